"""Test of scoring 10,000 sessions with an unreliable judge and a scoring process that is killed twice."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SESSION_COUNT = 10_000


@pytest.mark.alone
@pytest.mark.timeout(500)
def test_every_session_is_scored_once_or_has_a_failure_reason(tmp_path: Path) -> None:
    options = {
        "sessions": SESSION_COUNT,
        "slots": 48,
        "service": 0.05,
        "faults": 0.2,
        "kills": 2,
        "dir": tmp_path,
    }
    command = [sys.executable, str(ROOT / "bench" / "rewards.py"), "--json"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    assert completed.returncode == 0, completed.stderr[-2000:]
    metrics = json.loads(completed.stdout)
    assert completed.stderr.count("killed the scorer after") == 2

    store = sqlite3.connect(tmp_path / "store.db")
    state_counts = dict(store.execute("SELECT state, COUNT(*) FROM scores GROUP BY state"))
    assert sum(state_counts.values()) == SESSION_COUNT
    assert state_counts["scored"] > 0.95 * SESSION_COUNT
    (inconsistent_count,) = store.execute(
        "SELECT COUNT(*) FROM scores WHERE (state = 'fallback') != (COALESCE(reason, '') != '')"
    ).fetchone()
    assert inconsistent_count == 0, "the scores with a reason must be exactly the fallback scores"
    (rewarded_session_count, reward_count) = store.execute(
        "SELECT COUNT(DISTINCT r.session_id), COUNT(*) FROM rewards r JOIN scores s "
        "ON s.session_id = r.session_id AND s.state = 'scored' AND r.value = 0.5"
    ).fetchone()
    assert rewarded_session_count == reward_count == state_counts["scored"]
    assert store.execute("SELECT COUNT(*) FROM rewards").fetchone() == (reward_count,)
    for fault in ("silent", "busy", "malformed", "broken"):
        assert metrics["endpoint"][fault] > 100, f"the judge had too few {fault} faults"
    assert metrics["mib_late"] < 1.15 * metrics["mib_early"] + 8, "memory use grew"
