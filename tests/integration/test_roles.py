"""Test that individual roles can be restarted, drained and started while the run continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny_model
from tests.torture.run_process import ROOT, RunProcess, make_config


def run_roles_command(run: RunProcess, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run `instar roles` and return its rows, keyed by role name."""
    command = [sys.executable, "-m", "instar.cli.main", "roles", str(run.run_dir), *arguments, "--json"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 0, f"{completed.stderr}\n{run.collect_logs()}"
    return {row["name"]: row for row in json.loads(completed.stdout)}


def wait_for_two_more_steps(run: RunProcess) -> None:
    """Wait for two more steps, because the first may already have been in progress."""
    committed = run.count_committed_steps()
    assert run.wait_until(lambda: run.count_committed_steps() >= committed + 2)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunProcess]:
    model = make_tiny_model(tmp_path / "model", hidden=32, context=2048)
    config = make_config(tmp_path, model, steps=1000, mode="async", max_staleness=2, checkpoint_every=5)
    config["engine"]["count"] = 2
    process = RunProcess(tmp_path, config)
    process.start()
    yield process
    if not process.has_exited():
        process.kill()
    process.assert_no_orphans()


@pytest.mark.timeout(400)
def test_each_role_restarts_and_drains_while_run_continues(run: RunProcess) -> None:
    assert run.wait_until(lambda: run.run_dir.joinpath("store.db").exists() and run.is_ready(), 180)
    wait_for_two_more_steps(run)

    rows_before = run_roles_command(run)
    assert {row["state"] for row in rows_before.values()} == {"running"}
    assert set(rows_before) == {"engine-0", "engine-1", "gateway", "trainer", "rollout"}
    assert set(run.list_processes()) == {row["pid"] for row in rows_before.values()}
    assert all(Path(row["log"]).is_file() for row in rows_before.values())

    for name in ("engine-0", "gateway", "rollout", "trainer"):
        assert run_roles_command(run, "restart", name)[name]["state"] == "running"
        wait_for_two_more_steps(run)
        assert run_roles_command(run)[name]["pid"] != rows_before[name]["pid"], f"{name} was not restarted"

    os.kill(run_roles_command(run)["trainer"]["pid"], signal.SIGTERM)
    wait_for_two_more_steps(run)  # the supervisor did not request this exit, so it restarts the trainer

    assert run_roles_command(run, "drain", "engine-1")["engine-1"]["state"] == "stopped"
    wait_for_two_more_steps(run)
    assert run_roles_command(run, "start", "engine-1")["engine-1"]["state"] == "running"

    assert run_roles_command(run, "drain", "trainer")["trainer"]["state"] == "stopped"
    last_committed_step = run.query("SELECT MAX(step) FROM steps WHERE state = 'committed'")
    assert last_committed_step == run.query("SELECT MAX(step) FROM steps"), (
        "the current step was not finished and saved"
    )
    assert run_roles_command(run, "start", "trainer")["trainer"]["state"] == "running"
    wait_for_two_more_steps(run)

    lost = run.query("SELECT status, reason FROM sessions WHERE status IN (?, ?)", "failed", "abandoned")
    assert lost == [], f"sessions were lost\n{run.collect_logs()}"
    assert run.process is not None
    run.process.terminate()
    assert run.wait(120) == 130, run.collect_logs()
    run.assert_no_orphans()
    run.assert_replies_recorded()
    duplicates = run.query(
        "SELECT sample_key FROM claims GROUP BY run_id, epoch, sample_key HAVING COUNT(*) > 1"
    )
    assert duplicates == []
    assert {row["state"] for row in run_roles_command(run).values()} == {"down"}
