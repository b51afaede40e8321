"""Tests that recipes/minimal_loop.py trains a tiny model and stays short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from instar.store.sqlite import SqliteStore
from instar.types import Json
from tests.tiny import make_tiny_model

RECIPE = Path(__file__).parents[3] / "recipes" / "minimal_loop.py"


def score_letter_a(task: Json, answer: str) -> float:
    """Return 1 if the answer contains an "a", which a model with random weights sometimes writes."""
    return float("a" in answer)


async def test_minimal_loop_trains_and_publishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "model", context=2048)
    main = runpy.run_path(str(RECIPE))["main"]
    await main(tmp_path, model=str(model), steps=2, reward=score_letter_a)
    assert capsys.readouterr().out.count("reward 0.") == 2
    store = SqliteStore(tmp_path / "store.db")
    published = [policy.version for policy, _ in await store.published_policies("minimal")]
    sessions = await store.sessions("minimal")
    await store.close()
    assert published == [1, 2]
    assert len(sessions) == 2 * 3 * 8
    assert all(row.reward in (0.0, 1.0) and row.call_count for row in sessions)


def test_minimal_loop_stays_short() -> None:
    assert len(RECIPE.read_text().splitlines()) < 150
