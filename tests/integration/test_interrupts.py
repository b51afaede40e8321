"""Tests that Ctrl-C stops a run in bounded time and leaves no process behind, no matter what hangs."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny_model
from tests.torture.run_process import ROOT, RunProcess, is_alive, list_descendants, make_config

HANGING_MODULE = "tests.integration.hanging_parts"
HANGING_COMMAND = ["sh", "-c", "trap '' TERM; sleep 3600 & wait"]
STOP_TIMEOUT_SECONDS = 60.0
"""Hanging processes are killed after 33 s: `stop_timeout` plus 30 s. The rest is slack for a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


@pytest.fixture
def unresponsive_url() -> Generator[str]:
    """The URL of a server that accepts connections but never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def make_run(folder: Path, model: Path) -> RunProcess:
    return RunProcess(folder, make_config(folder, model, steps=50, stop_timeout=3))


def suspend(run: RunProcess, *roles: str) -> None:
    for pid, role in run.list_processes().items():
        if role in roles:
            os.kill(pid, signal.SIGSTOP)


def has_started_session(run: RunProcess) -> bool:
    try:
        return bool(run.query("SELECT 1 FROM sessions"))
    except sqlite3.OperationalError:
        return False  # the store has not been created yet


def interrupt_and_check_exit(
    run: RunProcess, *, times: int = 1, timeout_seconds: float = STOP_TIMEOUT_SECONDS
) -> None:
    """Send SIGINT ``times`` times, and check that the run exits in time and leaves no process behind."""
    assert run.process is not None
    pids = list_descendants(run.process.pid)
    for _ in range(times):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    try:
        assert run.wait(timeout_seconds) == 130, run.collect_logs()
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run did not stop within {timeout_seconds:g} s\n{run.collect_logs()}")
    finally:
        deadline = time.monotonic() + 10
        while (remaining := list(filter(is_alive, pids))) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in remaining:
            os.kill(pid, signal.SIGKILL)
    assert remaining == [], run.collect_logs()
    assert "Traceback" not in run.output.read_text()


def test_ctrl_c_with_a_suspended_trainer_kills_it_and_the_run_can_be_resumed(
    model: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, model)
    run.start()
    assert run.wait_until(lambda: run.is_ready() and bool(run.query("SELECT 1 FROM steps WHERE version = 1")))
    suspend(run, "trainer")
    interrupt_and_check_exit(run)
    assert "the trainer was killed, because it did not finish within 3 s" in run.output.read_text()
    assert run.query("SELECT status FROM runs") == [("stopped",)]
    run.config["trainer"]["steps"] = 4
    resumed = RunProcess(tmp_path, run.config)
    resumed.start(resume=True)
    resumed.finish()
    resumed.assert_consistent()


@pytest.mark.parametrize("roles", [["engine"], ["engine", "gateway", "rollout", "trainer"]])
def test_ctrl_c_with_suspended_roles_stops_the_run(model: Path, tmp_path: Path, roles: list[str]) -> None:
    run = make_run(tmp_path, model)
    run.start()
    assert run.wait_until(lambda: run.is_ready() and has_started_session(run))
    suspend(run, *roles)
    interrupt_and_check_exit(run)


def use_hanging_agent_command(config: dict[str, Any]) -> None:
    config["rollout"]["agent"] = {"type": "command", "command": HANGING_COMMAND}


def use_blocking_agent_function(config: dict[str, Any]) -> None:
    config["rollout"]["agent"]["function"] = f"{HANGING_MODULE}:block_event_loop"


def use_hanging_rule(config: dict[str, Any]) -> None:
    config["reward"] = {"type": "rule", "function": f"{HANGING_MODULE}:hang_in_rule"}
    config["scoring"] = {"deadline": 7200}


def use_hanging_engine(config: dict[str, Any]) -> None:
    config["engine"]["function"] = f"{HANGING_MODULE}:hang_in_engine"


@pytest.mark.parametrize(
    "change_config",
    [use_hanging_agent_command, use_blocking_agent_function, use_hanging_rule, use_hanging_engine],
)
def test_ctrl_c_with_hanging_code_stops_the_run(
    model: Path, tmp_path: Path, change_config: Callable[[dict[str, Any]], None]
) -> None:
    config = make_config(tmp_path, model, steps=50, stop_timeout=3)
    change_config(config)
    run = RunProcess(tmp_path, config)
    run.start()
    assert run.wait_until(lambda: has_started_session(run))
    interrupt_and_check_exit(run)


def test_ctrl_c_with_an_unresponsive_judge_stops_the_run(
    model: Path, tmp_path: Path, unresponsive_url: str
) -> None:
    config = make_config(tmp_path, model, steps=50, stop_timeout=3)
    config["reward"] = {"type": "judge", "endpoint": unresponsive_url, "model": "m", "timeout": 3600}
    config["scoring"] = {"deadline": 7200}
    run = RunProcess(tmp_path, config)
    run.start()
    assert run.wait_until(
        lambda: (
            has_started_session(run) and bool(run.query("SELECT 1 FROM sessions WHERE status = 'completed'"))
        )
    )
    interrupt_and_check_exit(run)


@pytest.mark.parametrize("role", ["engine", "gateway"])
def test_ctrl_c_during_startup_stops_the_run(model: Path, tmp_path: Path, role: str) -> None:
    run = make_run(tmp_path, model)
    run.start()
    assert run.wait_until(lambda: role in run.list_processes().values())
    suspend(run, role)
    interrupt_and_check_exit(run)


def test_second_ctrl_c_kills_suspended_roles_immediately(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, model)
    run.start()
    assert run.wait_until(lambda: run.is_ready() and has_started_session(run))
    suspend(run, "engine", "gateway", "rollout", "trainer")
    interrupt_and_check_exit(run, times=2, timeout_seconds=5)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_during_serve_startup_stops_it(model: Path, tmp_path: Path, times: int) -> None:
    run = make_run(tmp_path, model)
    command = [sys.executable, "-m", "instar.cli.main", "serve", str(run.config_path), "--json"]
    with run.output.open("ab") as output:
        run.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    assert run.wait_until(lambda: "engine" in run.list_processes().values())
    suspend(run, "engine")
    interrupt_and_check_exit(run, times=times, timeout_seconds=STOP_TIMEOUT_SECONDS if times == 1 else 5)
