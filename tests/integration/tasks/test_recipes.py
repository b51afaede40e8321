"""Tests that every task set's recipe trains one step with a tiny model."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

ROOT = Path(__file__).parents[3]
RECIPES = ["gsm8k", "gym", "textarena", "verifiers", "humaneval", "bfcl"]
REWARD_SOURCES = {"textarena": "agent", "verifiers": "agent"}
"""The reward source by recipe. It is `rule` for the other recipes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The tiny tokenizer needs almost one token per character, so the prompts are long.
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=16384)


def train(recipe: str, model: Path, folder: Path, *settings: str) -> None:
    """Train one step of the recipe. ``settings`` are additional `--set` values."""
    overrides = [
        f"model.name={model}",
        "model.max_context=16384",
        f"dir={folder}",
        "trainer.steps=1",
        "trainer.groups_per_step=2",
        "rollout.group_size=2",
        "eval=null",
        *settings,
    ]
    command = [sys.executable, "-m", "instar.cli.main", "train", f"recipes/{recipe}.yaml", "--json"]
    for override in overrides:
        command += ["--set", override]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert completed.returncode == 0, completed.stdout[-1500:] + completed.stderr[-1500:]
    assert json.loads(completed.stdout.splitlines()[-1])["steps"] == 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_one_step(recipe: str, model: Path, tmp_path: Path) -> None:
    if recipe == "bfcl" and find_spec("bfcl_eval") is None:
        pytest.skip("bfcl-eval is not installed: pip install --no-deps bfcl-eval")
    train(recipe, model, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "store.db") as store:
        session_counts = dict(store.execute("SELECT status, COUNT(*) FROM sessions GROUP BY status"))
        reward_sources = store.execute("SELECT DISTINCT source FROM rewards").fetchall()
        step_states = store.execute("SELECT state FROM steps").fetchall()
    assert session_counts["completed"] >= 4
    assert "failed" not in session_counts
    assert reward_sources == [(REWARD_SOURCES.get(recipe, "rule"),)]
    assert step_states == [("committed",)]


@pytest.mark.timeout(180)
def test_gsm8k_agent_with_tools_trains_one_step(model: Path, tmp_path: Path) -> None:
    agent_setting = "rollout.agent.function=instar.agents.gsm8k:solve_with_tools"
    train("gsm8k", model, tmp_path / "run", agent_setting, "reward={type: agent}")
    with sqlite3.connect(tmp_path / "run" / "store.db") as store:
        assert store.execute("SELECT DISTINCT source FROM rewards").fetchall() == [("agent",)]
