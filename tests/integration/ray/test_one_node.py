"""Tests for runs that start a Ray cluster on this machine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny_model
from tests.torture.run_process import RunProcess, is_alive, list_descendants, make_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


@pytest.fixture(autouse=True)
def set_ray_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")


def make_run(folder: Path, model: Path, **trainer_settings: Any) -> RunProcess:
    config = make_config(folder, model, **trainer_settings)
    return RunProcess(folder, {**config, "cluster": {"type": "ray"}})


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_run_on_local_ray_cluster_finishes_and_leaves_no_process(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, model, steps=3)
    process = run.start()
    assert run.wait_until(run.is_ready, 200)
    logs = dict(run.query("SELECT name, log FROM endpoints"))
    assert logs["trainer"] == f"127.0.0.1:{run.run_dir / 'logs' / 'trainer.log'}"
    descendants = list_descendants(process.pid)
    environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in run.list_processes()]
    assert all(b"INSTAR_LEASE=" in environment for environment in environments)
    run.finish(200)
    run.assert_consistent()
    wait_until(lambda: not any(map(is_alive, descendants)))


@pytest.mark.timeout(300)
def test_run_on_ray_drains_after_ctrl_c_and_roles_exit_with_the_driver(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, model, steps=6, checkpoint_every=100)
    process = run.start()
    assert run.wait_until(
        lambda: run.is_ready() and bool(run.query("SELECT 1 FROM steps WHERE version = 1")), 200
    )
    process.send_signal(signal.SIGINT)
    assert run.wait(100) == 130, run.collect_logs()
    assert {state for (state,) in run.query("SELECT state FROM steps")} == {"committed"}
    assert json.loads(run.output.read_text().splitlines()[-1])["stopped"] is True

    run.start(resume=True)
    assert run.wait_until(lambda: "trainer" in run.list_processes().values(), 200)
    run.kill()
    run.assert_no_orphans(timeout_seconds=30)  # roles on Ray exit later than local ones
