"""Test of a complete run whose sessions are scored by a separate process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model
from tests.torture.run_process import WORKLOAD_MODULE, RunProcess, make_config


@pytest.mark.timeout(180)
def test_run_with_killed_scoring_process_scores_every_session(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, context=2048)
    config = make_config(tmp_path, model, steps=3)
    config["reward"] = [{"type": "plugin", "name": "tests.integration.rewards.slow_scorer:SlowRule"}]
    config["eval"] = {
        "tasks": {"type": "python", "function": f"{WORKLOAD_MODULE}:make_tasks", "args": {"count": 4}},
        "modes": {"sampled": {}},
    }
    run = RunProcess(tmp_path, config)
    run.start()
    assert run.wait_until(lambda: run.is_ready() and bool(run.query("SELECT 1 FROM steps WHERE version = 1")))
    assert run.kill_role("rewards")
    run.finish()
    assert "rewards exited (signal SIGKILL); restarting it" in run.output.read_text()
    run.assert_consistent()
    assert run.query("SELECT DISTINCT status FROM groups") == [("ready",)]
    assert run.query("SELECT state, attempts, COUNT(*) FROM scores") == [
        ("scored", 2, run.query("SELECT COUNT(*) FROM sessions WHERE status = 'completed'")[0][0])
    ]
    ((reward_count, session_count, scorer, scorer_version),) = run.query(
        "SELECT COUNT(*), COUNT(DISTINCT session_id), MIN(scorer), MIN(scorer_version) FROM rewards"
    )
    assert reward_count == session_count, "a session has several rewards"
    assert (scorer, scorer_version) == ("slow", "1")
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = {record["label"]: record for record in records if record.get("kind") == "eval"}
    assert set(evaluations) == {"before", "after"}
    assert all(record["failed"] == 0 for record in evaluations.values())
