"""Tests that complete runs with a PostgreSQL store can be inspected, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instar.rollout.base import AgentSession
from tests.postgres import PASSWORD, PostgresTestServer
from tests.tiny import make_tiny_model
from tests.torture import workload
from tests.torture.postgres_run import PASSWORD_VARIABLE, PostgresRun
from tests.torture.run_process import RunProcess, make_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresTestServer]:
    server = PostgresTestServer(fsync=True)
    yield server
    server.remove()


async def agent(task: dict[str, Any], session: AgentSession, *, ledger: str) -> None:
    assert PASSWORD not in os.environ.values(), "an agent could read the store's password"
    await workload.agent(task, session, ledger=ledger)


def make_run(folder: Path, model: Path, server: PostgresTestServer, *, steps: int) -> PostgresRun:
    config = make_config(folder, model, steps=steps)
    config["rollout"]["agent"]["function"] = f"{__name__}:agent"
    return PostgresRun(folder, config, server)


@pytest.mark.timeout(240)
def test_run_on_postgres_finishes_and_can_be_inspected(
    model: Path, tmp_path: Path, postgres: PostgresTestServer
) -> None:
    run = make_run(tmp_path, model, postgres, steps=2)
    run.start()
    run.finish()
    run.assert_consistent()
    assert not (run.run_dir / "store.db").exists()
    sessions = json.loads(run.run_command("sessions", "ls", str(run.run_dir), "--json"))
    assert len(sessions) == run.query("SELECT COUNT(*) FROM sessions")[0][0]
    assert run.run_command(
        "sessions", "show", str(run.run_dir), str(run.query("SELECT session_id FROM sessions")[0][0])
    )
    assert run.run_command("report", str(run.run_dir))
    for path in (tmp_path, *tmp_path.rglob("*")):
        assert path.is_dir() or PASSWORD.encode() not in path.read_bytes(), f"the password is in {path}"
    assert_run_with_same_name_is_rejected(run, tmp_path / "second")


def assert_run_with_same_name_is_rejected(run: PostgresRun, folder: Path) -> None:
    """Start a run with the same name in a different folder, and check that it is rejected."""
    folder.mkdir()
    second = RunProcess(folder, {**run.config, "dir": str(folder / "run")})
    second.start(**{PASSWORD_VARIABLE: PASSWORD})
    assert second.wait(60) == 1
    assert "the store already has a run named" in second.output.read_text()
    assert not (folder / "run" / "config.json").exists()


@pytest.mark.timeout(300)
def test_run_on_postgres_survives_kill_and_server_restart(
    model: Path, tmp_path: Path, postgres: PostgresTestServer
) -> None:
    run = make_run(tmp_path, model, postgres, steps=5)

    run.start()
    assert run.wait_until(lambda: run.count_committed_steps() >= 1)
    run.kill()
    run.assert_no_orphans()
    run.start(resume=True)
    assert run.wait_until(lambda: run.is_ready() and run.count_committed_steps() >= 2)
    postgres.stop(signal.SIGQUIT)
    postgres.start()
    run.finish()
    run.assert_consistent()
