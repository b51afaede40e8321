"""Tests for bench/async.py: run settings, the scaled workload and the order of its sessions."""

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
from instar.simulate.bound import compute_session_cost
from instar.simulate.sessions import read_workload

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """The module bench/async.py, imported with its folder on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("async")
    for name in [name for name in sys.modules if name.split(".")[0] in ("async", "async_parts")]:
        del sys.modules[name]


def find_changed_keys(first: dict[str, Any], second: dict[str, Any], path: str = "") -> set[str]:
    changed: set[str] = set()
    for key in first.keys() | second.keys():
        old, new, key_path = first.get(key), second.get(key), f"{path}.{key}".lstrip(".")
        if isinstance(old, dict) and isinstance(new, dict):
            changed |= find_changed_keys(old, new, key_path)
        elif old != new:
            changed.add(key_path)
    return changed


@pytest.mark.parametrize("plan_name", ["CPU_PLAN", "GPU_PLAN"])
def test_async_bench_runs_differ_only_in_mode(bench: ModuleType, plan_name: str, tmp_path: Path) -> None:
    from async_parts.runs import make_run_settings  # pyright: ignore[reportMissingImports]

    plan = getattr(bench, plan_name)
    sync_settings, async_settings = (
        make_run_settings(plan, mode, tmp_path, tmp_path / "work", 0) for mode in ("sync", "async")
    )
    run_specific_keys = {"name", "dir", "rollout.tasks.args.run_dir"}
    assert find_changed_keys(sync_settings, async_settings) - run_specific_keys == {
        "trainer.mode",
        "trainer.max_staleness",
    }
    for settings in (sync_settings, async_settings):
        config = RunConfig.model_validate(settings)
        assert config.rollout is not None
        batch_sessions = config.rollout.group_size * config.trainer.groups_per_step
        assert config.rollout.concurrency >= batch_sessions, (
            "in sync mode, all sessions of a batch must run at once"
        )


def test_async_bench_scales_waits_and_replies_equally(bench: ModuleType) -> None:
    from async_parts.runs import DECODE_SPEED, scale_workload  # pyright: ignore[reportMissingImports]

    plan = bench.GPU_PLAN
    original = read_workload(bench.WORKLOAD)
    scaled = scale_workload(original, plan)
    assert [len(session.turns) for session in scaled] == [len(session.turns) for session in original]
    cost, original_cost = (compute_session_cost(sessions, fails=False) for sessions in (scaled, original))
    assert cost.wait_seconds / original_cost.wait_seconds == pytest.approx(plan.scale)
    tokens, original_tokens = (
        sum(turn.generated_tokens for session in sessions for turn in session.turns)
        for sessions in (scaled, original)
    )
    reply_scale = tokens / plan.speed / (original_tokens / DECODE_SPEED)
    assert reply_scale == pytest.approx(plan.scale, rel=0.1)


def test_async_bench_assigns_sessions_to_groups_in_file_order(bench: ModuleType, tmp_path: Path) -> None:
    from async_parts.agent import make_tasks  # pyright: ignore[reportMissingImports]

    workload_path = tmp_path / "work.jsonl"
    workload_path.write_text("".join(f'{{"turns": [[{n}, 1, 0]]}}\n' for n in range(3)))
    store = sqlite3.connect(tmp_path / "store.db")
    store.execute("CREATE TABLE endpoints (role TEXT, doing TEXT)")
    store.execute("INSERT INTO endpoints VALUES ('trainer', 'waiting for data for step 1')")
    store.commit()
    store.close()
    tasks = make_tasks(str(workload_path), 2, 2, str(tmp_path))
    assert [[session[0][0] for session in task["sessions"]] for task in tasks] == [[0, 1], [2, 0]]
    assert float((tmp_path / "started_at").read_text()) > 0
