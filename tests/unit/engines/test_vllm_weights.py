"""The pause in which a vLLM server's weights change, where something fails in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from instar.engines.vllm import weights as module
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.weights import NO_VERSION, ServerWeights
from instar.errors import EngineUnavailable
from tests.unit.engines.fake_vllm import StatefulFakeVllm, event
from tests.unit.engines.test_vllm import begin


@pytest.fixture
async def server() -> AsyncIterator[StatefulFakeVllm]:
    async with StatefulFakeVllm(Path("model")).serving() as server:
        yield server


@pytest.fixture
async def weights(server: StatefulFakeVllm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServerWeights]:
    monkeypatch.setattr(module, "RESUME_WAITS", (0.01, 0.01))
    client = VllmClient(server.url)
    found = ServerWeights(client)
    found.stores_version = True
    yield found
    await client.close()


async def change_to(weights: ServerWeights, version: int) -> None:
    async with weights.paused() as change:
        change.start()
        change.finish(version)


async def test_a_name_that_is_not_taken_does_not_matter(
    server: StatefulFakeVllm, weights: ServerWeights
) -> None:
    server.failing.add("/update_weight_version")
    await change_to(weights, 5)
    assert weights.version == 5
    assert not server.paused


async def test_a_pause_is_ended_though_that_fails_once(
    server: StatefulFakeVllm, weights: ServerWeights
) -> None:
    server.failing_once.add("/resume")
    await change_to(weights, 5)
    assert weights.version == 5
    assert not server.paused


async def test_nothing_is_served_where_a_pause_cannot_be_ended(
    server: StatefulFakeVllm, weights: ServerWeights
) -> None:
    """So that the policy is brought again."""
    server.failing.add("/resume")
    with pytest.raises(Exception, match="as the test wants it"):
        await change_to(weights, 5)
    assert weights.version == NO_VERSION
    server.failing.clear()
    await change_to(weights, 5)
    assert weights.version == 5
    assert not server.paused


async def test_a_pause_whose_answer_was_lost_is_ended(
    server: StatefulFakeVllm, weights: ServerWeights
) -> None:
    server.failing_once.add("/pause")
    with pytest.raises(EngineUnavailable):
        await change_to(weights, 5)
    assert weights.version == 0
    assert not server.paused


async def test_replies_that_do_not_come_to_rest_are_given_up(
    server: StatefulFakeVllm, weights: ServerWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.1)
    reply = await begin(weights.client, weights)

    async def trickle() -> None:
        while True:
            server.events.put_nowait(event(7))
            await asyncio.sleep(0.001)

    trickling = asyncio.create_task(trickle())
    await change_to(weights, 5)
    trickling.cancel()
    assert weights.version == 5
    with pytest.raises(EngineUnavailable):
        async for _ in reply.chunks():
            pass


async def test_a_change_that_is_given_up_before_it_counts_serves_nothing(
    server: StatefulFakeVllm, weights: ServerWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are new by then, and must not go by the old version."""
    monkeypatch.setattr(module, "QUIET_SECONDS", 60.0)
    changing = asyncio.create_task(change_to(weights, 5))
    async with asyncio.timeout(5):
        while not server.paused:  # noqa: ASYNC110 - of another's
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    assert weights.version == NO_VERSION
