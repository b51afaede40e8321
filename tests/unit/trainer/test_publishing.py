"""Engines that fall behind are brought up while the trainer waits for data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from instar.engines.base import Engine, EngineStatus
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.sync.base import RouteError, Sync
from instar.sync.files import FileSync
from instar.trainer.publishing import MAX_REFUSALS, PolicyPublisher
from instar.types import Artifact, Policy
from tests.tiny import make_tiny_model
from tests.unit.sync.test_files import LoadingEngine
from tests.unit.trainer.harness import RUN, fill, make_config, open_trainer

HEAD = Policy("p", 3, Artifact("adapter", "somewhere"))


def pusher_for(*engines: Engine, sync: Sync | None = None) -> tuple[PolicyPublisher, list[str]]:
    log: list[str] = []

    async def current() -> list[Engine]:
        return list(engines)

    return PolicyPublisher(sync or FileSync(attempts=1), current, log.append, poll_seconds=0.01), log


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0.005)


async def test_an_engine_that_a_push_did_not_reach_is_brought_up_later() -> None:
    late, good = LoadingEngine(EngineUnavailable("starting"), EngineError("no room")), LoadingEngine()
    pusher, log = pusher_for(late, good)
    await pusher.push(HEAD)
    assert (late.version, good.version) == (0, 3)
    assert pusher.report["engines"] == 2
    assert pusher.report["engines_behind"] == 1
    await pusher.sync_while_waiting(HEAD, until(lambda: late.version == 3))
    assert good.attempts == 1
    assert any("did not reach an engine" in line and "no room" in line for line in log)
    assert any("reached 1 engine(s) at last" in line for line in log)


async def test_an_engine_that_was_started_again_is_brought_up() -> None:
    engine = LoadingEngine()
    pusher, _ = pusher_for(engine)
    await pusher.push(HEAD)

    async def restart() -> str:
        engine.version = 0
        await until(lambda: engine.version == 3)
        return "a batch"

    assert await pusher.sync_while_waiting(HEAD, restart()) == "a batch"


async def test_engines_that_do_not_answer_are_left_alone() -> None:
    class Away(LoadingEngine):
        async def status(self) -> EngineStatus:
            raise EngineUnavailable("not up yet")

    engine = Away()
    pusher, _ = pusher_for(engine)
    await pusher.sync_while_waiting(HEAD, asyncio.sleep(0.2))
    assert engine.attempts == 0


async def test_the_run_ends_when_all_engines_go_on_refusing() -> None:
    refusals = [EngineError("rank 64 is too much") for _ in range(2 * MAX_REFUSALS)]
    pusher, log = pusher_for(LoadingEngine(*refusals), LoadingEngine(*refusals))
    await pusher.push(HEAD)
    with pytest.raises(SyncError, match="rank 64 is too much"):
        await pusher.sync_while_waiting(HEAD, asyncio.sleep(60))
    assert len(log) == 2 * MAX_REFUSALS


async def test_the_run_ends_when_the_way_goes_on_failing() -> None:
    class Blocked(Sync):
        route = "blocked"

        async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
            told = SyncError("out of memory")
            told.__cause__ = RouteError("out of memory")
            return [told for _ in engines]

    pusher, _ = pusher_for(LoadingEngine(), sync=Blocked())
    await pusher.push(HEAD)
    with pytest.raises(SyncError, match="out of memory"):
        await pusher.sync_while_waiting(HEAD, asyncio.sleep(60))


async def test_one_engine_that_refuses_stops_nobody() -> None:
    refusing, good = LoadingEngine(*[EngineError("broken") for _ in range(99)]), LoadingEngine()
    pusher, _ = pusher_for(refusing, good)
    for version in range(1, 2 * MAX_REFUSALS):
        await pusher.push(Policy("p", version, HEAD.artifact))
    assert good.version == 2 * MAX_REFUSALS - 1


class SlowLive(Sync):
    live = True
    route = "slow"

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.begun = asyncio.Event()
        self.seconds = 0.0

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        self.begun.set()
        await asyncio.sleep(self.seconds)
        for engine in engines:
            await engine.load(Policy(policy.policy_id, policy.version, Artifact("base")))
        self.pushed.append(policy.version)
        return [None] * len(engines)


async def test_weights_on_their_way_out_of_the_backend_get_there_before_a_batch_is_trained_on() -> None:
    sync = SlowLive()
    sync.seconds = 0.2
    pusher, _ = pusher_for(LoadingEngine(), sync=sync)
    await pusher.sync_while_waiting(HEAD, sync.begun.wait())
    assert sync.pushed == [3]


async def test_a_load_of_files_does_not_hold_up_a_batch() -> None:
    engine = LoadingEngine(seconds=60)
    pusher, _ = pusher_for(engine)
    async with asyncio.timeout(20):
        await pusher.sync_while_waiting(HEAD, until(lambda: engine.attempts > 0))


async def test_a_saved_version_has_files_also_where_engines_are_given_weights_without(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    config = make_config(tmp_path / "run", model, checkpoint_every=2)
    await fill(config)
    async with open_trainer(config) as harness:
        sync = SlowLive()
        harness.trainer.sync = harness.trainer.publisher.sync = sync
        await harness.trainer.run()
        kinds = {policy.version: policy.artifact.kind for policy, _ in await harness.store.published(RUN)}
        assert sync.pushed == [0, 1, 2, 3]
        assert kinds == {1: "live", 2: "adapter", 3: "adapter"}
        assert (await harness.engine.status()).version == 3
        await harness.head_hash()
    async with open_trainer(config) as harness:  # as after a crash, with files from now on
        await harness.trainer.run()
        assert (await harness.engine.status()).version == 3
