"""Tests that policies are pushed to all engines, and again to engines that do not serve them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from instar.engines.base import Engine, EngineStatus
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.sync.base import RouteError, SyncRoute
from instar.sync.files import FileSync
from instar.trainer.publishing import MAX_REFUSALS, PolicyPublisher
from instar.types import Artifact, Policy
from tests.tiny import make_tiny_model
from tests.unit.sync.test_files import LoadingEngine
from tests.unit.trainer.harness import RUN, fill_store, make_config, open_trainer

HEAD = Policy("p", 3, Artifact("adapter", "path"))


def make_publisher(*engines: Engine, sync: SyncRoute | None = None) -> PolicyPublisher:
    async def list_engines() -> list[Engine]:
        return list(engines)

    return PolicyPublisher(sync or FileSync(attempts=1), list_engines, poll_seconds=0.01)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


async def test_publisher_retries_an_engine_that_a_push_did_not_reach(log: list[str]) -> None:
    late_engine = LoadingEngine(EngineUnavailable("starting"), EngineError("out of memory"))
    healthy_engine = LoadingEngine()
    publisher = make_publisher(late_engine, healthy_engine)
    await publisher.push(HEAD)
    assert (late_engine.version, healthy_engine.version) == (0, 3)
    assert publisher.report["engines"] == 2
    assert publisher.report["engines_behind"] == 1
    await publisher.sync_while_waiting(HEAD, wait_until(lambda: late_engine.version == 3))
    assert healthy_engine.attempts == 1
    assert any("did not reach an engine" in line and "out of memory" in line for line in log)
    assert any("reached 1 engine(s) after a retry" in line for line in log)


async def test_publisher_pushes_to_an_engine_that_was_restarted() -> None:
    engine = LoadingEngine()
    publisher = make_publisher(engine)
    await publisher.push(HEAD)

    async def restart() -> str:
        engine.version = 0
        await wait_until(lambda: engine.version == 3)
        return "a batch"

    assert await publisher.sync_while_waiting(HEAD, restart()) == "a batch"


async def test_publisher_does_not_push_to_engines_without_a_status() -> None:
    class UnavailableEngine(LoadingEngine):
        async def status(self) -> EngineStatus:
            raise EngineUnavailable("not up yet")

    engine = UnavailableEngine()
    await make_publisher(engine).sync_while_waiting(HEAD, asyncio.sleep(0.2))
    assert engine.attempts == 0


async def test_publisher_fails_when_all_engines_keep_refusing(log: list[str]) -> None:
    refusals = [EngineError("rank 64 is not supported") for _ in range(2 * MAX_REFUSALS)]
    publisher = make_publisher(LoadingEngine(*refusals), LoadingEngine(*refusals))
    await publisher.push(HEAD)
    with pytest.raises(SyncError, match="rank 64 is not supported"):
        await publisher.sync_while_waiting(HEAD, asyncio.sleep(60))
    assert len(log) == 2 * MAX_REFUSALS


async def test_publisher_fails_when_the_route_keeps_failing() -> None:
    class FailingSync(SyncRoute):
        description = "failing"

        async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
            error = SyncError("out of memory")
            error.__cause__ = RouteError("out of memory")
            return [error for _ in engines]

    publisher = make_publisher(LoadingEngine(), sync=FailingSync())
    await publisher.push(HEAD)
    with pytest.raises(SyncError, match="out of memory"):
        await publisher.sync_while_waiting(HEAD, asyncio.sleep(60))


async def test_publisher_continues_while_only_one_engine_refuses() -> None:
    refusing_engine = LoadingEngine(*[EngineError("broken") for _ in range(99)])
    healthy_engine = LoadingEngine()
    publisher = make_publisher(refusing_engine, healthy_engine)
    for version in range(1, 2 * MAX_REFUSALS):
        await publisher.push(Policy("p", version, HEAD.artifact))
    assert healthy_engine.version == 2 * MAX_REFUSALS - 1


class SlowLiveSync(SyncRoute):
    is_live = True
    description = "slow"

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.started = asyncio.Event()
        self.push_seconds = 0.0

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        self.started.set()
        await asyncio.sleep(self.push_seconds)
        for engine in engines:
            await engine.load(Policy(policy.policy_id, policy.version, Artifact("base")))
        self.pushed.append(policy.version)
        return [None] * len(engines)


async def test_live_push_finishes_before_the_batch_is_returned() -> None:
    sync = SlowLiveSync()
    sync.push_seconds = 0.2
    publisher = make_publisher(LoadingEngine(), sync=sync)
    await publisher.sync_while_waiting(HEAD, sync.started.wait())
    assert sync.pushed == [3]


async def test_file_push_does_not_delay_the_batch() -> None:
    engine = LoadingEngine(load_seconds=60)
    async with asyncio.timeout(20):
        await make_publisher(engine).sync_while_waiting(HEAD, wait_until(lambda: engine.attempts > 0))


async def test_saved_versions_have_files_with_live_sync(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    config = make_config(tmp_path / "run", model, checkpoint_every=2)
    await fill_store(config)
    async with open_trainer(config) as harness:
        sync = SlowLiveSync()
        harness.trainer.publisher.sync = sync
        await harness.trainer.run()
        artifact_kinds = {
            policy.version: policy.artifact.kind for policy, _ in await harness.store.published_policies(RUN)
        }
        assert sync.pushed == [0, 1, 2, 3]
        assert artifact_kinds == {1: "live", 2: "adapter", 3: "adapter"}
        assert (await harness.engine.status()).version == 3
        await harness.hash_latest_adapter()
    async with open_trainer(config) as harness:  # a restarted trainer, with file sync
        await harness.trainer.run()
        assert (await harness.engine.status()).version == 3
