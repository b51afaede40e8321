from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from instar.engines.base import Engine, EngineInfo, EngineStatus
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.http.retry import RetryPolicy
from instar.sync.files import RETRY, FileSync
from instar.types import Artifact, Policy, PolicyRef, SamplingParams, TokenChunk

POLICY = Policy("p", 3, Artifact("adapter", "path"))


class LoadingEngine(Engine):
    """An engine whose first loads raise ``errors``. Each load takes ``load_seconds``."""

    def __init__(self, *errors: Exception, load_seconds: float = 0.0) -> None:
        self.errors = list(errors)
        self.load_seconds = load_seconds
        self.attempts = 0
        self.version = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("loading", "none", 1, 1, ("adapter",))

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncIterator[TokenChunk]:
        raise EngineError("this engine only loads")

    async def load(self, policy: Policy) -> None:
        self.attempts += 1
        await asyncio.sleep(self.load_seconds)
        if self.errors:
            raise self.errors.pop(0)
        self.version = policy.version

    async def status(self) -> EngineStatus:
        return EngineStatus(self.version)

    async def close(self) -> None: ...


async def test_push_loads_on_all_engines_concurrently() -> None:
    engines = [LoadingEngine(load_seconds=0.2) for _ in range(5)]
    start = time.perf_counter()
    assert await FileSync().push(POLICY, engines) == [None] * 5
    assert time.perf_counter() - start < 0.9
    assert [engine.version for engine in engines] == [3] * 5


async def test_push_failure_of_one_engine_does_not_affect_others() -> None:
    healthy_engine, failing_engine = LoadingEngine(), LoadingEngine(EngineError("wrong rank"))
    failed, succeeded = await FileSync().push(POLICY, [failing_engine, healthy_engine])
    assert isinstance(failed, SyncError)
    assert "version 3 of p" in str(failed)
    assert "wrong rank" in str(failed)
    assert failing_engine.attempts == 1
    assert succeeded is None
    assert healthy_engine.version == 3


async def test_push_retries_transient_failures() -> None:
    engine = LoadingEngine(EngineUnavailable("starting"), ConnectionResetError("gone"))
    assert await FileSync(retry=RetryPolicy(first_delay=0.001)).push(POLICY, [engine]) == [None]
    assert engine.attempts == 3
    assert engine.version == 3


async def test_push_stops_after_max_attempts() -> None:
    engine = LoadingEngine(*[EngineUnavailable("down") for _ in range(9)])
    (outcome,) = await FileSync(attempts=4, retry=RetryPolicy(first_delay=0.001)).push(POLICY, [engine])
    assert isinstance(outcome, SyncError)
    assert "down" in str(outcome)
    assert engine.attempts == 4


@pytest.mark.parametrize(
    "engine", [LoadingEngine(load_seconds=60), LoadingEngine(EngineUnavailable("starting"))]
)
async def test_push_fails_after_the_timeout(engine: LoadingEngine) -> None:
    start = time.perf_counter()
    (outcome,) = await FileSync(timeout=0.1, retry=RetryPolicy(first_delay=60, max_delay=60)).push(
        POLICY, [engine]
    )
    assert isinstance(outcome, SyncError)
    assert "0.1 s" in str(outcome)
    assert time.perf_counter() - start < 5


def test_default_retry_delays_double() -> None:
    for attempt in range(5):
        assert 0.5 * 2**attempt <= RETRY.delay(attempt) / 0.25 <= 1.5 * 2**attempt
