"""Tests of short runs of `bench/live.py` with a model of random weights, which does not learn anything."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny_model
from tests.torture.run_process import is_alive, list_pids, read_arguments

BENCH = Path(__file__).parents[2] / "bench" / "live.py"
DAYS, SESSIONS_PER_DAY = 2, 6


def make_command(model: Path, out: Path) -> list[str]:
    sizes = {
        "--days-per-week": 1,
        "--sessions-per-day": SESSIONS_PER_DAY,
        "--held-out": 4,
        "--groups-per-step": 3,
        "--sanity-items": 12,
    }
    options = [str(part) for option in sizes.items() for part in option]
    options += ["--agents", "editor", "--weeks", "good,inverted", "--promote", "owner"]
    return [sys.executable, str(BENCH), "--json", "--model", str(model), "--out", str(out), *options]


def query(store: Path, sql: str) -> list[Any]:
    try:
        with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
            return database.execute(sql).fetchall()
    except sqlite3.OperationalError:  # the store does not exist yet
        return []


@pytest.mark.timeout(900)
def test_bench_live_killed_during_a_day_continues_and_repeats_no_session(tmp_path: Path) -> None:
    command = make_command(make_tiny_model(tmp_path / "model", std=0.2), tmp_path / "out")
    store = tmp_path / "out" / "editor_good-inverted_owner" / "editor" / "run" / "store.db"
    with (tmp_path / "first.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    while len(query(store, "SELECT 1 FROM feedback")) < 2:
        assert process.poll() is None, (tmp_path / "first.log").read_text()
        time.sleep(0.05)
    process.kill()
    process.wait()
    completed = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    figures = json.loads(completed.stdout)
    names = ("satisfaction_before", "satisfaction_after", "worst_drop", "poison_share", "sanity_drop")
    assert all(-1 <= figures[name] <= 1 for name in names), figures
    assert figures["agents"]["editor"]["candidates"] >= 1
    where = "status = 'completed' AND channel = 'live'"
    slots = query(store, f"SELECT task_id FROM sessions WHERE {where} GROUP BY task_id")
    assert len(slots) == DAYS * SESSIONS_PER_DAY
    rated = query(store, "SELECT s.task_id FROM feedback f JOIN sessions s USING (session_id)")
    assert len(rated) == len(set(rated)) > DAYS * SESSIONS_PER_DAY / 2
    days = query(store, "SELECT MAX(created_at) - MIN(created_at) FROM sessions")[0][0] / 86_400
    assert 1 < days < DAYS, "the sessions must be spread over the virtual time"
    leftovers = [pid for pid in list_pids() if str(store.parent) in read_arguments(pid) and is_alive(pid)]
    assert not leftovers


@pytest.mark.timeout(60)
def test_bench_live_unknown_agent_is_an_error() -> None:
    completed = subprocess.run(
        [sys.executable, str(BENCH), "--agents", "nobody"], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 2
    assert "nobody" in completed.stderr
    assert "editor, guide, clerk" in completed.stderr
