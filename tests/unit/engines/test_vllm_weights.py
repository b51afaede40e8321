"""Tests for failures while the weights of a vLLM server change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.weights import NO_VERSION, PauseTiming, ServerWeights
from instar.errors import EngineError, EngineUnavailable
from tests.unit.engines.fake_vllm import StatefulFakeVllm, make_event
from tests.unit.engines.test_vllm import start_reply


@pytest.fixture
async def server() -> AsyncIterator[StatefulFakeVllm]:
    async with StatefulFakeVllm(Path("model")).serving() as server:
        yield server


@pytest.fixture
async def client(server: StatefulFakeVllm) -> AsyncIterator[VllmClient]:
    client = VllmClient(server.url)
    yield client
    await client.close()


def create_weights(client: VllmClient, **timing: float) -> ServerWeights:
    weights = ServerWeights(client, PauseTiming(resume_delays=(0.01, 0.01), **timing))
    weights.can_store_version = True
    return weights


@pytest.fixture
def weights(client: VllmClient) -> ServerWeights:
    return create_weights(client)


async def change_version(weights: ServerWeights, version: int) -> None:
    async with weights.pause_sampling() as change:
        change.start()
        change.finish(version)


async def test_weight_change_succeeds_if_the_server_does_not_store_the_version(
    server: StatefulFakeVllm, weights: ServerWeights
) -> None:
    server.failing_paths.add("/update_weight_version")
    await change_version(weights, 5)
    assert weights.version == 5
    assert not server.paused


async def test_resume_is_retried_after_a_failure(server: StatefulFakeVllm, weights: ServerWeights) -> None:
    server.paths_failing_once.add("/resume")
    await change_version(weights, 5)
    assert weights.version == 5
    assert not server.paused


async def test_version_is_invalid_if_the_server_cannot_be_resumed(
    server: StatefulFakeVllm, weights: ServerWeights
) -> None:
    server.failing_paths.add("/resume")
    with pytest.raises(EngineError, match="requested by the test"):
        await change_version(weights, 5)
    assert weights.version == NO_VERSION
    server.failing_paths.clear()
    await change_version(weights, 5)
    assert weights.version == 5
    assert not server.paused


async def test_server_is_resumed_if_the_pause_response_is_lost(
    server: StatefulFakeVllm, weights: ServerWeights
) -> None:
    server.paths_failing_once.add("/pause")
    with pytest.raises(EngineUnavailable):
        await change_version(weights, 5)
    assert weights.version == 0
    assert not server.paused


async def test_replies_that_never_settle_are_aborted(server: StatefulFakeVllm, client: VllmClient) -> None:
    weights = create_weights(client, quiet_seconds=0.5, settle_timeout=1.2)
    reply = await start_reply(client, weights)

    async def send_events() -> None:
        while True:
            server.events.put_nowait(make_event(7))
            await asyncio.sleep(0.001)

    sender_task = asyncio.create_task(send_events())
    await change_version(weights, 5)
    sender_task.cancel()
    assert weights.version == 5
    with pytest.raises(EngineUnavailable):
        async for _ in reply.stream_chunks():
            pass


async def test_version_is_invalid_if_a_change_is_cancelled_before_it_takes_effect(
    server: StatefulFakeVllm, client: VllmClient
) -> None:
    """The weights are already new and must not be served as the old version."""
    weights = create_weights(client, quiet_seconds=60.0)
    change_task = asyncio.create_task(change_version(weights, 5))
    async with asyncio.timeout(30):
        while not server.paused:  # noqa: ASYNC110 - the server has no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    change_task.cancel()
    await asyncio.gather(change_task, return_exceptions=True)
    assert weights.version == NO_VERSION
