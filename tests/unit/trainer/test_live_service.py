"""Tests that policies of live agents are trained on a service, served by it, and exported again in time.

The service is the shipped protocol server, used through the real SDK.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from instar.backends.factory import create_backend
from instar.config import CloudEngineConfig, RunConfig, TinkerBackendConfig
from instar.engines.base import Engine
from instar.engines.cloud.tinker import TinkerSampler
from instar.errors import EngineError
from instar.gateway.live_policies import LiveOptions, LivePolicies
from instar.live.learning_window import LearningWindow
from instar.store.sqlite import SqliteStore
from instar.sync.files import FileSync
from instar.trainer.live import LineageTrainer, LiveTrainer
from instar.trainer.monitor import Monitor, read_steps
from instar.trainer.publishing import PolicyPublisher
from instar.types import Channel, Policy, PolicyRef, SamplingParams, Session
from tests.sdk_leaks import IGNORE_SDK_LEAKS, collect_sdk_leaks
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, put_test_run
from tests.unit.data.test_live import add_live
from tests.unit.protocol.serving import serve_in_thread

API_KEY = "tml-test-key"
AGENT = "support"
POLICY = f"{RUN}/{AGENT}"
PROMPT = [5, 6, 7, 8]
TTL_SECONDS = 6.0
DEADLINE_SECONDS = 60
pytestmark = IGNORE_SDK_LEAKS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Generator[RunConfig]:
    settings: dict[str, Any] = {
        "name": RUN,
        "dir": tmp_path / "run",
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu", "max_context": 256},
        "data": "live",
        "agents": {AGENT: {"mode": "learn"}},
        "trainer": {"steps": 9, "groups_per_step": 1, "adam": {"lr": 1e-2}, "tensorboard": False},
    }
    served = RunConfig.model_validate(settings).model
    folder = tmp_path / "checkpoints"
    with collect_sdk_leaks(), serve_in_thread("tinker", served, folder=folder, keys=[API_KEY]) as url:
        backend = {"type": "tinker", "base_url": url, "api_key": API_KEY, "rank": 4, "deadline": 60}
        yield RunConfig.model_validate({**settings, "backend": {**backend, "sampler_ttl": TTL_SECONDS}})


@dataclass
class Harness:
    store: SqliteStore
    trainer: LiveTrainer
    engine: TinkerSampler
    live: LivePolicies
    window: LearningWindow

    async def add_session(self, name: str) -> None:
        await add_live(self.store, name, 1.0, ended=float(name[1:]), agent_id=AGENT)

    async def wait_for_version(self, version: int) -> Policy:
        async def is_published() -> bool:
            return version in await self.store.promotable_versions(POLICY)

        await wait_until(is_published)
        return await self.find_version(version)

    async def find_version(self, version: int) -> Policy:
        rows = await self.store.policy_versions(POLICY)
        return next(row.policy for row in rows if row.policy.version == version)

    async def choose(self) -> PolicyRef:
        session = Session("s", RUN, AGENT, POLICY, Channel.LIVE)
        return (await self.live.choose(POLICY, session)).ref

    async def score(self, ref: PolicyRef) -> list[float]:
        return (await self.engine.logprobs(PROMPT, ref)).tolist()[1:]


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():  # noqa: ASYNC110 - the store is asked
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running_parts(config: RunConfig, *, trains: bool = True) -> AsyncGenerator[Harness]:
    """Run the trainer and the gateway's choice of versions until the block exits."""
    assert isinstance(config.backend, TinkerBackendConfig)
    store = SqliteStore(config.store_path)
    if await store.run(RUN) is None:
        await put_test_run(store)
    engine = TinkerSampler(config.model, config.backend, CloudEngineConfig())
    backend = create_backend(config)

    async def list_engines() -> list[Engine]:
        return [engine]

    monitor = Monitor(config.run_dir, agent=AGENT)
    lineage = LineageTrainer(
        config.select_agent(AGENT),
        store=store,
        backend=backend,
        publisher=PolicyPublisher(FileSync(), list_engines),
        monitor=monitor,
    )
    window = LearningWindow(config, store)
    trainer = LiveTrainer(config, backend, [lineage], may_run=window.may_start_step)
    live = LivePolicies(store, engine, [POLICY], LiveOptions())
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(live.run())
            if trains:
                group.create_task(trainer.run())
            yield Harness(store, trainer, engine, live, window)
            trainer.stop()
            watching.cancel()
    finally:
        window.close()
        monitor.close()
        await backend.close()
        await engine.close()
        await store.close()


async def test_promoted_version_serves_with_the_same_weights_after_its_first_sampler_has_expired(
    config: RunConfig,
) -> None:
    async with running_parts(config) as parts:
        await parts.add_session("s1")
        first = await parts.wait_for_version(1)
        assert await parts.choose() == PolicyRef(POLICY, 0)
        await parts.store.promote_version(POLICY, 1)

        async def is_served() -> bool:
            return await parts.choose() == first.ref

        await wait_until(is_served)
        scores = await parts.score(first.ref)
        assert scores != pytest.approx(await parts.score(PolicyRef(POLICY, 0)), abs=1e-3)
        await parts.add_session("s2")
        await parts.wait_for_version(2)
        assert first.artifact.expires_at is not None
        while time.time() < first.artifact.expires_at + 2:
            assert await parts.score(await parts.choose()) == pytest.approx(scores, abs=1e-5)
            await asyncio.sleep(0.1)
        renewed = await parts.find_version(1)
        assert renewed.artifact.path != first.artifact.path
        await parts.add_session("s3")
        await parts.wait_for_version(3)
        rows = {row.policy.version: row.parent for row in await parts.store.policy_versions(POLICY)}
        assert rows == {1: 0, 2: 1, 3: 2}


async def test_rollback_to_a_version_whose_sampler_has_expired_serves_it_once_it_is_exported_again(
    config: RunConfig,
) -> None:
    async with running_parts(config) as parts:
        for version in (1, 2):
            await parts.add_session(f"s{version}")
            await parts.wait_for_version(version)
            await parts.store.promote_version(POLICY, version)
        await parts.engine.keep(await parts.find_version(1))
        scores = await parts.score(PolicyRef(POLICY, 1))
    await asyncio.sleep(TTL_SECONDS)
    async with running_parts(config, trains=False) as parts:
        number = await parts.store.roll_back(POLICY, RUN, 1)

        async def has_problem() -> bool:
            return f"{POLICY}@{number} has expired on the service" in parts.live.problem

        await wait_until(has_problem)
        with pytest.raises(EngineError, match=rf"{POLICY}@{number} \(serving\) cannot be loaded"):
            await parts.choose()
    async with running_parts(config) as parts:

        async def is_served() -> bool:
            serving = parts.live.get(POLICY).serving
            return serving is not None and serving.version == number

        await wait_until(is_served)
        assert await parts.score(await parts.choose()) == pytest.approx(scores, abs=1e-5)


async def test_open_sampler_that_expires_fails_without_disturbing_the_requests_of_other_versions(
    config: RunConfig,
) -> None:
    async with running_parts(config) as parts:
        await parts.add_session("s1")
        first = await parts.wait_for_version(1)
    async with running_parts(config, trains=False) as parts:
        await parts.engine.keep(first)
        await parts.score(first.ref)
        params = SamplingParams(max_tokens=200, temperature=0)
        await asyncio.sleep(TTL_SECONDS)
        async with aclosing(parts.engine.generate(PROMPT, params, PolicyRef(POLICY, 0))) as base_reply:
            in_flight = asyncio.ensure_future(anext(base_reply))
            await asyncio.sleep(0.05)
            with pytest.raises(EngineError, match=f"{first.ref} has expired"):
                await parts.score(first.ref)
            assert set((await in_flight).versions) == {0}


async def test_step_records_all_tokens_that_it_sent_to_the_service(config: RunConfig) -> None:
    async with running_parts(config) as parts:
        await parts.add_session("s1")
        await parts.wait_for_version(1)
    (step,) = read_steps(config.run_dir)
    # It is sent twice to train (`updates_per_step`), twice to measure the KL, and once to the base model.
    assert step["sent_tokens"] == 5 * step["sequence_tokens"]


async def test_budget_is_counted_before_every_step(config: RunConfig) -> None:
    """The second session is there from the start, so nothing but the budget delays its step."""
    changes = {**config.model_dump(exclude_unset=True), "live": {"window": {"daily_budget": 1, "idle": None}}}
    config = RunConfig.model_validate(changes)
    async with running_parts(config, trains=False) as parts:
        await parts.add_session("s1")
        await parts.add_session("s2")
    async with running_parts(config) as parts:
        await parts.wait_for_version(1)
        await asyncio.sleep(2)
        assert [step.step for step in await parts.store.steps(POLICY)] == [1]
        assert "20 of 1 tokens are used today" in parts.window.describe("waiting")
