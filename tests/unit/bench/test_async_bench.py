"""What bench/async.py measures: two runs that differ in their mode, on the fixed workload."""

from __future__ import annotations

import importlib
import sqlite3
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instar.config import RunConfig
from instar.simulate.sessions import read_workload

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """bench/async.py, which finds its parts beside itself."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("async")
    for name in [name for name in sys.modules if name.split(".")[0] in ("async", "async_parts")]:
        del sys.modules[name]


def changed(one: dict[str, Any], other: dict[str, Any], path: str = "") -> set[str]:
    found: set[str] = set()
    for key in one.keys() | other.keys():
        first, second, where = one.get(key), other.get(key), f"{path}.{key}".lstrip(".")
        if isinstance(first, dict) and isinstance(second, dict):
            found |= changed(first, second, where)
        elif first != second:
            found.add(where)
    return found


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_the_two_runs_differ_in_their_mode_alone(bench: ModuleType, device: str, tmp_path: Path) -> None:
    from async_parts.runs import settings  # pyright: ignore[reportMissingImports]

    plan = getattr(bench, device)
    sync, ahead = (settings(plan, mode, tmp_path, tmp_path / "work", 0) for mode in ("sync", "async"))
    named = {"name", "dir", "rollout.tasks.args.run_dir"}
    assert changed(sync, ahead) - named == {"trainer.mode", "trainer.max_staleness"}
    for given in (sync, ahead):
        config = RunConfig.model_validate(given)
        assert config.rollout is not None
        batch = config.rollout.group_size * config.trainer.groups_per_step
        assert config.rollout.concurrency >= batch, "sync launches all of a batch's sessions at once"


def test_times_and_replies_are_scaled_alike(bench: ModuleType) -> None:
    from async_parts.runs import DECODE, scaled  # pyright: ignore[reportMissingImports]

    plan = bench.GPU
    whole = read_workload(bench.WORKLOAD)
    short = scaled(whole, plan)
    assert [len(session.turns) for session in short] == [len(session.turns) for session in whole]
    tools = sum(session.wait_seconds for session in short) / sum(session.wait_seconds for session in whole)
    assert tools == pytest.approx(plan.scale)
    spoken = sum(s.generated for s in short) / plan.speed / (sum(s.generated for s in whole) / DECODE)
    assert spoken == pytest.approx(plan.scale, rel=0.1)


def test_sessions_are_dealt_to_groups_in_the_order_of_the_file(bench: ModuleType, tmp_path: Path) -> None:
    from async_parts.play import tasks  # pyright: ignore[reportMissingImports]

    work = tmp_path / "work.jsonl"
    work.write_text("".join(f'{{"turns": [[{n}, 1, 0]]}}\n' for n in range(3)))
    store = sqlite3.connect(tmp_path / "store.db")
    store.execute("CREATE TABLE endpoints (role TEXT, doing TEXT)")
    store.execute("INSERT INTO endpoints VALUES ('trainer', 'waiting for the data of step 1')")
    store.commit()
    store.close()
    given = tasks(str(work), 2, 2, str(tmp_path))
    assert [[play[0][0] for play in task["plays"]] for task in given] == [[0, 1], [2, 0]]
    assert float((tmp_path / "began").read_text()) > 0
