"""Tests for the phases of a run with real processes. Each role runs a shell script instead of Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Unpack

import msgspec
import pytest

from instar.backends.resolve import RunSecrets
from instar.cluster.base import RoleOptions
from instar.cluster.control import ControlRequest, RoleController
from instar.cluster.layout import RunFolder
from instar.cluster.live_run import LiveRun, describe_agents_without_key, serve_run
from instar.cluster.roles.gateway import make_live_options
from instar.cluster.run import (
    describe_changes,
    evaluate,
    record_failure,
    run_phases,
    run_training,
    wait_for_scoring,
)
from instar.cluster.supervisor import ChildProcess, Supervisor
from instar.config import RunConfig
from instar.engines.base import EngineInfo
from instar.errors import ConfigError, InstarError, StoreFull
from instar.store.base import KeyRow, Run
from instar.store.sqlite import SqliteStore
from instar.types import Artifact, Endpoint, Policy
from tests.tiny import make_tiny_model
from tests.unit.cluster.test_supervisor import Script, script, wait_until

__all__ = ["script"]

SLEEP = "exec sleep 60"
RUN_UNTIL_DONE = (
    "trap 'exit 75' USR1 TERM; echo $* >> $FOLDER/output; while [ ! -e $FOLDER/done ]; do sleep 0.02; done"
)


class ScriptedSupervisor(Supervisor):
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
    cluster = ScriptedSupervisor(folder, log=log.append)
    cluster.programs = {"trainer": script(SLEEP), "rollout": script(RUN_UNTIL_DONE), "rewards": script(SLEEP)}
    control = RoleController(cluster, store, "run")
    yield LiveRun(config, folder, cluster, control, store, "token", "key", RunSecrets({}, frozenset()))
    await cluster.close()
    await store.close()


def read_output(run: LiveRun) -> list[str]:
    path = run.folder.path.parent / "output"
    return path.read_text().splitlines() if path.exists() else []


async def test_stop_while_the_trainer_starts_is_not_a_failure(run: LiveRun) -> None:
    stop = asyncio.Event()
    training_task = asyncio.create_task(run_training(run, stop))
    await wait_until(lambda: "trainer" in run.cluster.roles)
    stop.set()
    await asyncio.wait_for(training_task, 20)
    with pytest.raises(InstarError, match="trainer cannot be started"):
        await run.control.handle(ControlRequest("start", "trainer"))


async def test_rollout_restarted_during_an_evaluation_continues_it(run: LiveRun) -> None:
    evaluation_task = asyncio.create_task(evaluate(run, "before", asyncio.Event()))
    await wait_until(lambda: len(read_output(run)) == 1)
    await run.control.handle(ControlRequest("restart", "rollout"))
    await wait_until(lambda: len(read_output(run)) == 2)
    assert not evaluation_task.done()
    assert all("--evaluate=before" in line for line in read_output(run))
    (run.folder.path.parent / "done").touch()
    await asyncio.wait_for(evaluation_task, 20)


async def test_stop_ends_an_evaluation_whose_rollout_is_drained(run: LiveRun) -> None:
    stop = asyncio.Event()
    evaluation_task = asyncio.create_task(evaluate(run, "before", stop))
    await wait_until(lambda: len(read_output(run)) == 1)
    await run.control.handle(ControlRequest("drain", "rollout"))
    assert not evaluation_task.done()
    stop.set()
    await asyncio.wait_for(evaluation_task, 20)


async def test_run_with_a_published_policy_skips_the_first_evaluation(run: LiveRun) -> None:
    version = await run.store.reserve_version("run", "run", 1)
    await run.store.publish(Policy("run", version, Artifact("live")))
    stop = asyncio.Event()
    phases_task = asyncio.create_task(run_phases(run, stop))
    await wait_until(lambda: len(read_output(run)) == 1)
    assert (run.phase, "--evaluate" in read_output(run)[0]) == ("training", False)
    stop.set()
    await asyncio.wait_for(phases_task, 20)


async def test_stop_ends_the_wait_for_the_last_scores(run: LiveRun) -> None:
    await run.cluster.start("rewards")
    await run.store.put_endpoint(Endpoint("run", "rewards", "rewards", "", 1, "scoring 5 sessions", "x"))
    stop = asyncio.Event()
    scoring_task = asyncio.create_task(wait_for_scoring(run, stop))
    await asyncio.sleep(0.1)
    assert not scoring_task.done()
    stop.set()
    await asyncio.wait_for(scoring_task, 5)


def test_agents_without_an_active_key_are_reported() -> None:
    config = RunConfig.model_validate({"agent_id": "own", "agents": {"own": {}, "helper": {}, "suport": {}}})
    keys = [
        KeyRow("a", "agent", "support"),
        KeyRow("b", "agent", "helper", revoked_at=1.0),
        KeyRow("c", "admin"),
    ]
    helper, misspelled = describe_agents_without_key(config, keys)
    assert helper.startswith("agents.helper: no active API key belongs to this agent; create one with")
    assert "did you mean 'support'?" in misspelled
    assert misspelled.endswith("Agents with keys: support")


def test_changes_name_nested_settings_with_both_values() -> None:
    previous = {"steps": 9, "adam": {"lr": 2e-4, "beta1": 0.9}, "off_policy": {}}
    current = {"steps": 9, "adam": {"lr": 3e-4, "beta1": 0.9}, "off_policy": {}, "preset": "careful"}
    assert describe_changes(previous, current, "trainer") == [
        "trainer.adam.lr: 0.0002 → 0.0003",
        "trainer.preset: None → careful",
    ]


class FullDiskStore(SqliteStore):
    async def put_run(self, run: Run) -> None:
        raise StoreFull("the disk is full")


async def test_record_failure_with_a_full_store_does_not_raise(run: LiveRun) -> None:
    await record_failure(run, OSError("the first cause"))
    run_row = await run.store.run("run")
    assert run_row is not None
    assert (run_row.status, run_row.reason) == ("failed", "the first cause")
    store = run.store
    run.store = FullDiskStore(run.folder.path / "store.db")
    await record_failure(run, InstarError("another error"))
    await run.store.close()
    run.store = store


def test_gateway_rejects_an_engine_with_one_version_for_live_data(tmp_path: Path) -> None:
    live = {"data": "live", "agents": {"support": {"mode": "learn"}}, "dir": tmp_path}
    config = RunConfig.model_validate(live)
    info = EngineInfo("vllm", "m", 10, 10, ("adapter",))
    with pytest.raises(
        ConfigError, match=r"engine\.policy: must be adapter: the vllm engine serves only one"
    ):
        make_live_options(config, info)
    options = make_live_options(config, msgspec.structs.replace(info, serves_several_policies=True))
    assert options.initial == Artifact("base")


async def test_run_with_one_policy_for_all_agents_cannot_continue_on_live_traffic(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    config = RunConfig.model_validate(
        {
            "name": "run",
            "dir": tmp_path / "run",
            "model": {"name": str(model), "device": "cpu"},
            "engine": {"type": "scripted"},
            "data": "live",
            "agents": {"support": {"mode": "learn"}},
        }
    )
    RunFolder(config.run_dir).create(config)
    store = SqliteStore(config.store_path)
    await store.claim_step("run", 1, [])
    await store.close()
    with pytest.raises(ConfigError, match=r"already trained one for all agents.*model\.adapter: run:run"):
        async with serve_run(config, resume=True):
            pass
