"""The phases of a run over real processes: each role is a small shell script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Unpack

import pytest

from instar.backends.resolve import RunSecrets
from instar.cluster.base import RoleOptions
from instar.cluster.control import ControlRequest, RoleController
from instar.cluster.layout import RunFolder
from instar.cluster.live_run import LiveRun
from instar.cluster.phases import evaluate, finish_scoring, run_phases, run_training
from instar.cluster.run import record_failure
from instar.cluster.supervisor import ChildProcess, Supervisor
from instar.config import RunConfig
from instar.errors import InstarError, StoreFull
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import Artifact, Endpoint, Policy
from tests.unit.cluster.test_supervisor import Script, script, until

__all__ = ["script"]

SLEEP = "exec sleep 60"
ENDS = "trap 'exit 75' USR1 TERM; echo $* >> $FOLDER/said; while [ ! -e $FOLDER/done ]; do sleep 0.02; done"


class Scripted(Supervisor):
    programs: dict[str, str]

    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> ChildProcess:
        options["python"] = self.programs[role]
        return await super().start(role, *arguments, **options)


@pytest.fixture
async def run(tmp_path: Path, script: Script) -> AsyncGenerator[LiveRun]:
    folder = RunFolder(tmp_path / "run")
    config = RunConfig.model_validate(
        {
            "name": "run",
            "dir": folder.path,
            "rollout": {
                "tasks": {"type": "python", "function": "a:b"},
                "agent": {"type": "function", "function": "a:b"},
            },
            "eval": {"tasks": {"type": "python", "function": "a:b"}},
        }
    )
    folder.create(config)
    store = SqliteStore(folder.path / "store.db")
    await store.put_run(Run("run", "run", {}))
    log: list[str] = []
    cluster = Scripted(folder, log=log.append)
    cluster.programs = {"trainer": script(SLEEP), "rollout": script(ENDS), "rewards": script(SLEEP)}
    control = RoleController(cluster, store, "run")
    yield LiveRun(config, folder, cluster, control, store, "token", "key", RunSecrets({}, frozenset()))
    await cluster.close()
    await store.close()


def said(run: LiveRun) -> list[str]:
    path = run.folder.path.parent / "said"
    return path.read_text().splitlines() if path.exists() else []


async def test_a_stop_as_the_trainer_starts_is_no_failure(run: LiveRun) -> None:
    stop = asyncio.Event()
    training = asyncio.create_task(run_training(run, stop))
    await until(lambda: "trainer" in run.cluster.roles)
    stop.set()
    await asyncio.wait_for(training, 20)
    with pytest.raises(InstarError, match="trainer is not started"):
        await run.control.handle(ControlRequest("start", "trainer"))


async def test_rollout_is_restarted_in_an_evaluation(run: LiveRun) -> None:
    evaluating = asyncio.create_task(evaluate(run, "before", asyncio.Event()))
    await until(lambda: len(said(run)) == 1)
    await run.control.handle(ControlRequest("restart", "rollout"))
    await until(lambda: len(said(run)) == 2)
    assert not evaluating.done()
    assert all("--evaluate=before" in line for line in said(run))
    (run.folder.path.parent / "done").touch()
    await asyncio.wait_for(evaluating, 20)


async def test_a_stop_ends_an_evaluation_that_is_held(run: LiveRun) -> None:
    stop = asyncio.Event()
    evaluating = asyncio.create_task(evaluate(run, "before", stop))
    await until(lambda: len(said(run)) == 1)
    await run.control.handle(ControlRequest("drain", "rollout"))
    assert not evaluating.done()
    stop.set()
    await asyncio.wait_for(evaluating, 20)


async def test_what_was_trained_is_not_evaluated_as_before(run: LiveRun) -> None:
    version = await run.store.reserve_version("run", "run", 1)
    await run.store.publish(Policy("run", version, Artifact("live")))
    stop = asyncio.Event()
    phases = asyncio.create_task(run_phases(run, stop))
    await until(lambda: len(said(run)) == 1)
    assert (run.phase, "--evaluate" in said(run)[0]) == ("training", False)
    stop.set()
    await asyncio.wait_for(phases, 20)


async def test_a_stop_ends_the_wait_for_the_last_scores(run: LiveRun) -> None:
    await run.cluster.start("rewards")
    await run.store.put_endpoint(Endpoint("run", "rewards", "rewards", "", 1, "scoring 5 sessions", "x"))
    stop = asyncio.Event()
    scoring = asyncio.create_task(finish_scoring(run, stop))
    await asyncio.sleep(0.1)
    assert not scoring.done()
    stop.set()
    await asyncio.wait_for(scoring, 5)


class Full(SqliteStore):
    async def put_run(self, run: Run) -> None:
        raise StoreFull("the disk is full")


async def test_a_failure_that_cannot_be_noted_does_not_hide_its_cause(run: LiveRun) -> None:
    await record_failure(run, OSError("the first cause"))
    noted = await run.store.run("run")
    assert noted is not None
    assert (noted.status, noted.reason) == ("failed", "the first cause")
    store = run.store
    run.store = Full(run.folder.path / "store.db")
    await record_failure(run, InstarError("another"))
    await run.store.close()
    run.store = store
