"""Tests for complete runs: Ctrl-C, file permissions, config errors, crashed roles and resumed runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instar.umask import use_umask
from tests.tiny import make_tiny_model
from tests.torture.run_process import ROLES, WORKLOAD_MODULE, RunProcess, make_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


def test_run_after_ctrl_c_finishes_its_step_and_can_be_resumed(model: Path, tmp_path: Path) -> None:
    run = RunProcess(tmp_path, make_config(tmp_path, model, steps=4, checkpoint_every=100))
    process = run.start()
    assert run.wait_until(lambda: run.is_ready() and bool(run.query("SELECT 1 FROM steps WHERE version = 1")))
    process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.collect_logs()
    run.assert_no_orphans(timeout_seconds=0.5)
    steps = run.query("SELECT state FROM steps")
    assert 1 <= len(steps) < 4
    assert {state for (state,) in steps} == {"committed"}, "the current step was not finished and saved"
    assert run.query("SELECT status FROM runs") == [("stopped",)]
    assert json.loads(run.output.read_text().splitlines()[-1])["stopped"] is True
    run.start(resume=True)
    run.finish()
    run.assert_consistent()
    assert run.query("SELECT status FROM runs") == [("finished",)]


def test_run_after_second_ctrl_c_stops_immediately(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model, steps=4)
    config["rollout"]["agent"] = {"type": "command", "command": ["sleep", "60"]}
    run = RunProcess(tmp_path, config)
    process = run.start()
    assert run.wait_until(run.is_ready)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert run.wait(5) == 130, run.collect_logs()
    run.assert_no_orphans(timeout_seconds=1.0)


def list_public_paths(folder: Path) -> list[str]:
    """Return the files and folders that other users can access."""
    return [str(path) for path in [folder, *folder.rglob("*")] if path.stat().st_mode & 0o077]


def test_run_files_are_private_except_agent_files(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model, steps=1, tensorboard=True)
    eval_tasks = {"type": "python", "function": f"{WORKLOAD_MODULE}:make_tasks", "args": {"count": 1}}
    config["eval"] = {"tasks": eval_tasks, "modes": {"sampled": {}}, "at_end": False}
    run = RunProcess(tmp_path, config)
    with use_umask(0o022):
        run.start()
        run.finish()
        command = [sys.executable, "-m", "instar.cli.main", "sessions", "export", str(run.run_dir)]
        subprocess.run([*command, "--to", str(tmp_path / "export")], check=True, timeout=120)
    assert {"report", "checkpoints", "policies", "logs", "metrics.jsonl", "tensorboard", "store.db"} <= {
        path.name for path in run.run_dir.iterdir()
    }
    assert list_public_paths(run.run_dir) == []
    assert list_public_paths(tmp_path / "export") == []
    assert (tmp_path / "ledger.txt").stat().st_mode & 0o777 == 0o644


def test_run_with_config_error_prints_message_without_traceback(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model, steps=4)
    config["rollout"]["agent"]["function"] = "tests.torture.workload:missing"
    run = RunProcess(tmp_path, config)
    run.start()
    assert run.wait(60) == 1
    output = run.output.read_text()
    assert "error: rollout: 'tests.torture.workload' has no attribute 'missing'" in output
    assert "Traceback" not in output
    run.assert_no_orphans(timeout_seconds=0.5)
    assert run.query("SELECT status FROM runs") == [("failed",)]


def test_killed_engine_restarts_with_latest_policy(model: Path, tmp_path: Path) -> None:
    run = RunProcess(tmp_path, make_config(tmp_path, model, steps=8))
    run.start()
    assert run.wait_until(lambda: run.count_committed_steps() >= 2)
    assert run.kill_role("engine")
    run.finish()
    assert "engine exited (signal SIGKILL); restarting it" in run.output.read_text()
    run.assert_consistent()
    stale_claim_count = run.query("SELECT COUNT(*) FROM claims WHERE reason = 'stale'")
    assert stale_claim_count == [(0,)], "the restarted engine must not sample with the base model"


def test_resume_of_finished_run_trains_additional_steps(model: Path, tmp_path: Path) -> None:
    run = RunProcess(tmp_path, make_config(tmp_path, model, steps=2))
    run.start()
    run.finish()
    run.config["trainer"]["steps"] = 4
    resumed = RunProcess(tmp_path, run.config)
    resumed.start(resume=True)
    resumed.finish()
    resumed.assert_consistent()


@pytest.mark.parametrize("role", ROLES)
def test_role_exits_if_supervisor_is_killed_during_startup(role: str, model: Path, tmp_path: Path) -> None:
    run = RunProcess(tmp_path, make_config(tmp_path, model, steps=4))
    run.start()
    assert run.wait_until(lambda: role in run.list_processes().values())
    run.kill()
    run.assert_no_orphans()
