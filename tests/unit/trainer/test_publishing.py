"""Tests that policies are pushed to all engines, and again to engines that do not serve them."""

from __future__ import annotations

import asyncio
import time
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
from tests.unit.trainer.harness import (
    RUN,
    FaultInjector,
    SimulatedCrash,
    fill_store,
    make_config,
    open_trainer,
)

HEAD = Policy("p", 3, Artifact("adapter", "path"))


def make_publisher(*engines: Engine, sync: SyncRoute | None = None, every: int = 1) -> PolicyPublisher:
    async def list_engines() -> list[Engine]:
        return list(engines)

    return PolicyPublisher(sync or FileSync(attempts=1), list_engines, every=every, poll_seconds=0.01)


def make_policy(version: int, expires_at: float | None = None) -> Policy:
    return Policy("p", version, Artifact("adapter", "path", expires_at=expires_at))


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


async def test_publisher_pushes_one_of_several_policies() -> None:
    engine = LoadingEngine()
    publisher = make_publisher(engine, every=3)
    versions: list[int] = []
    for version in range(1, 9):
        await publisher.push_if_due(make_policy(version))
        versions.append(engine.version)
    assert versions == [0, 0, 3, 3, 3, 6, 6, 6]
    await publisher.push_last()
    await publisher.push_last()
    assert (engine.version, engine.attempts) == (8, 3)


async def test_served_version_is_less_than_every_versions_behind_after_tombstoned_ones() -> None:
    engine = LoadingEngine()
    publisher = make_publisher(engine, every=3)
    await publisher.push(make_policy(3))
    await publisher.push_if_due(make_policy(5))
    assert engine.version == 3
    await publisher.push_if_due(make_policy(6))
    assert engine.version == 6


async def test_engine_that_serves_the_last_push_does_not_lag_behind_skipped_policies() -> None:
    engine, restarted_engine = LoadingEngine(), LoadingEngine()
    publisher = make_publisher(engine, restarted_engine, every=3)
    await publisher.push(make_policy(3))
    await publisher.push_if_due(make_policy(4))
    restarted_engine.version = 0
    await publisher.sync_while_waiting(make_policy(4), wait_until(lambda: restarted_engine.version == 4))
    assert (engine.version, engine.attempts) == (3, 1)


async def test_publisher_reports_no_duration_for_a_skipped_policy() -> None:
    publisher = make_publisher(LoadingEngine(), every=2)
    await publisher.push(make_policy(1))
    assert "sync_seconds" in publisher.report
    await publisher.push_if_due(make_policy(2))
    assert publisher.report == {"engines": 1, "engines_behind": 0}
    await publisher.push_if_due(make_policy(3))
    assert "sync_seconds" in publisher.report


async def test_renewal_time_follows_the_artifact_that_expires_first() -> None:
    publisher, now = make_publisher(LoadingEngine(), every=3), time.time()
    await publisher.push(make_policy(0))
    assert publisher.renewal_time is None
    await publisher.push_if_due(make_policy(1, expires_at=now + 300))
    await publisher.push_if_due(make_policy(2, expires_at=now + 600))
    assert publisher.renewal_time == pytest.approx(now + 200, abs=10), "engines that restart load version 1"
    await publisher.push_if_due(make_policy(3, expires_at=now + 900))
    await publisher.push_if_due(make_policy(4, expires_at=now + 1200))
    assert publisher.renewal_time == pytest.approx(now + 600, abs=10), "the engines serve version 3"


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


async def test_run_fails_if_its_last_version_was_refused_by_all_engines() -> None:
    """A run of a few quick steps ends before the publisher has retried often enough to fail."""
    publisher = make_publisher(LoadingEngine(*[EngineError("experts are not supported")] * 99))
    await publisher.push_if_due(make_policy(1))
    await publisher.push_if_due(make_policy(2))
    with pytest.raises(SyncError, match=r"version 2 .*experts are not supported"):
        await publisher.push_last()


async def test_last_version_that_an_engine_loads_after_a_refusal_is_served() -> None:
    engine = LoadingEngine(EngineError("out of memory"))
    publisher = make_publisher(engine)
    await publisher.push_if_due(make_policy(1))
    await publisher.push_last()
    assert engine.version == 1


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


async def test_run_updates_the_engines_in_every_second_step_and_at_the_end(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", make_tiny_model(tmp_path / "model", hidden=32), sync={"every": 2})
    await fill_store(config)
    async with open_trainer(config) as harness:
        sync = SlowLiveSync()
        harness.trainer.publisher.sync = sync
        await harness.trainer.run()
        assert sync.pushed == [0, 2, 3]
        assert (await harness.engine.status()).version == 3
        assert (await harness.store.latest_policy(RUN)).version == 3


async def test_recovery_updates_the_engines_even_if_no_update_is_due(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", make_tiny_model(tmp_path / "model", hidden=32), sync={"every": 2})
    await fill_store(config)
    async with open_trainer(config, FaultInjector("saved")) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
    async with open_trainer(config) as harness:
        await harness.trainer.recover()
        assert (await harness.engine.status()).version == 1


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
