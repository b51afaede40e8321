"""Test that a run started by the previous version can be resumed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.previous_version import CORRECTED_ID, UNTRAINABLE_ID, copy_previous_run, make_previous_model

ROOT = Path(__file__).parents[2]
CLAIMS_SQL = (
    "SELECT epoch, sample_key, session_id, outcome, step, reason, reward, advantage FROM claims ORDER BY seq"
)


def query(run_dir: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(run_dir / "store.db")) as database:
        return database.execute(sql).fetchall()


def test_resume_finishes_a_run_started_by_the_previous_version(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    run_dir = copy_previous_run(folder)
    make_previous_model(folder)
    claims_before = query(run_dir, CLAIMS_SQL)
    args = ["train", str(folder / "run.yaml"), "--resume", "--json"]
    completed = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["steps"] == 6
    assert query(run_dir, "SELECT status FROM runs") == [("finished",)]
    assert query(run_dir, "SELECT step, state, version FROM steps ORDER BY step") == [
        (step, "committed", step) for step in range(1, 7)
    ]
    claims = query(run_dir, CLAIMS_SQL)
    assert claims[: len(claims_before)] == claims_before
    keys = [(epoch, sample_key) for epoch, sample_key, *_ in claims]
    assert len(set(keys)) == len(keys), "a sample was claimed twice"
    new_claims = [
        (session_id, outcome, step) for _, _, session_id, outcome, step, *_ in claims[len(claims_before) :]
    ]
    assert {step for _, _, step in new_claims} == {3, 4, 5, 6}
    assert (CORRECTED_ID, "trained", 3) in new_claims, "the correction was not trained on"
    assert (UNTRAINABLE_ID, "dropped", 3) in new_claims
    state = json.loads((run_dir / "checkpoints" / "step-000006" / "backend" / "state.json").read_text())
    # Steps 1 and 2 had one update each. The run's config does not set their number, and the default is now 2.
    assert state["counters"]["optim_steps"] == 2 + 4 * 2, "the optimizer did not continue from the checkpoint"
