"""Tests that training samples contain exactly the sampled tokens, for agents that act at random.

A tiny fp32 model is trained to call tools, so that sampling at temperature 1 yields valid calls, malformed
calls and plain text. The agents call a gateway over HTTP. Their sessions cover streaming, 0 to 3 tools,
1 to 5 actions, limits of 1 to 64 tokens, stop strings, several scripts, characters split over tokens, tool
results, several choices, repeated, concurrent and retried requests, abandoned replies, forks, sub-agents, and
edited or summarized histories. The samples are compared with the tokens recorded by `RecordingEngine`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from instar.backends.local.backend import LocalBackend
from instar.config import LocalBackendConfig, LocalEngineConfig, RunConfig
from instar.data.linearize import linearize
from instar.engines.local.engine import LocalEngine
from instar.gateway.base import OpenSession
from instar.rollout.base import AgentSession
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Call, CallStatus, Channel, Link, Sample, SamplingParams
from tests.integration.random_agent import RandomAgent
from tests.integration.recording_engine import Emission, RecordingEngine, make_emission_key
from tests.integration.tool_call_model import (
    make_model_config,
    make_sample,
    train_lineage,
    train_tool_call_model,
)
from tests.serving import ADMIN_KEY, running_gateway

SESSION_COUNT = 1000
CONCURRENCY = 32
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def tool_call_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(train_tool_call_model(tmp_path_factory.mktemp("model")))


@dataclass
class ExactnessHarness:
    """A gateway with a recording engine and a store."""

    engine: RecordingEngine
    store: SqliteStore
    client: GatewayClient
    http: aiohttp.ClientSession
    event_counts: Counter[str]

    async def run_agents(self, count: int, seed: str) -> list[RandomAgent]:
        """Run ``count`` agents in one session each, ``CONCURRENCY`` at a time."""
        slots = asyncio.Semaphore(CONCURRENCY)

        async def run_agent(number: int) -> RandomAgent:
            async with slots:
                rng = random.Random(f"{seed}/{number}")
                agent = RandomAgent(self.http, await self._open_session(rng), rng)
                await agent.run()
                self.event_counts += agent.event_counts
                return agent

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_agent(number)) for number in range(count)]
        return [task.result() for task in tasks]

    async def _open_session(self, rng: random.Random) -> AgentSession:
        """Open a session. Some have other sampling settings, which must not affect the recorded logprobs."""
        sampling = {"temperature": 0.7, "top_p": 0.9} if rng.random() < 0.1 else {}
        return await self.client.open_session(
            OpenSession(channel=Channel.TRAIN, seed=rng.getrandbits(60), sampling=sampling)
        )

    def find_emission(self, call: Call) -> Emission:
        return self.engine.emissions[make_emission_key(call.prompt_ids.tolist(), call.params)]


@pytest.fixture
async def harness(tool_call_model: Path, tmp_path: Path) -> AsyncIterator[ExactnessHarness]:
    config = RunConfig(name="exact", model=make_model_config(tool_call_model))
    local = LocalEngine(config.model, LocalEngineConfig(threads=1, kv_tokens=200_000))
    engine, store = RecordingEngine(local), SqliteStore(tmp_path / "store.db")
    async with running_gateway(config, store, engine) as url:
        client = GatewayClient(url, ADMIN_KEY)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield ExactnessHarness(engine, store, client, http, Counter())
        await client.close()
    await engine.close()
    await store.close()


# --- checks for every session -------------------------------------------------------------------


def check_calls(harness: ExactnessHarness, calls: list[Call]) -> None:
    """Check that the recorded calls equal the engine's emissions, bit for bit.

    An incomplete call may contain only the first tokens of its emission.
    """
    for call in calls:
        emission = harness.find_emission(call)
        count = len(call.sampled_ids)
        if call.status is CallStatus.OK:
            assert emission.is_finished
            assert count == len(emission.ids)
        assert call.sampled_ids.tolist() == emission.ids[:count]
        assert call.versions.tolist() == emission.versions[:count]
        np.testing.assert_array_equal(call.logprobs, np.asarray(emission.logprobs[:count], np.float32))


def check_samples(harness: ExactnessHarness, calls: list[Call], samples: list[Sample]) -> int:
    """Check that every complete reply is trained on exactly once, after the prompt it was sampled from.

    Returns the number of trained tokens.
    """
    calls_by_id = {call.call_id: call for call in calls}
    trained_counts: Counter[str] = Counter()
    for sample in samples:
        expected_mask = np.zeros(len(sample), bool)
        for span in sample.spans:
            positions = slice(span.start, span.start + span.length)
            if not sample.mask[positions].any():
                continue
            emission = harness.find_emission(calls_by_id[span.call_id])
            assert sample.token_ids[: span.start].tolist() == emission.prompt
            assert sample.token_ids[positions].tolist() == emission.ids
            assert sample.versions[positions].tolist() == emission.versions
            expected_mask[positions] = True
            trained_counts[span.call_id] += 1
        np.testing.assert_array_equal(sample.mask, expected_mask)
    assert trained_counts == Counter(call.call_id for call in calls if call.status is CallStatus.OK)
    return sum(sample.trained_tokens for sample in samples)


def check_links(agent: RandomAgent, calls: list[Call]) -> int:
    """Check that a call continues an earlier one if, and only if, the agent kept its history.

    The prompt of such a call must start with the exact tokens of the earlier call. Returns the number of
    such calls.
    """
    calls_by_id = {call.call_id: call for call in calls}
    calls_by_request: dict[str, list[Call]] = {}
    for call in calls:
        calls_by_request.setdefault(call.request_id, []).append(call)
    extending_calls = 0
    for request in agent.requests:
        for call in calls_by_request[request.request_id]:
            if request.kind == "fresh":
                assert call.link is not Link.EXTENDS
                continue
            assert call.link in (Link.EXTENDS, Link.SIBLING)
            assert call.parent_id is not None
            parent = calls_by_id[call.parent_id]
            # The gateway cannot distinguish replies with equal text when an agent sends one back.
            assert parent.messages == calls_by_request[request.parent or ""][0].messages
            assert call.prompt_ids[: len(parent.sequence)].tolist() == parent.sequence.tolist()
            extending_calls += 1
    return extending_calls


async def check_session(harness: ExactnessHarness, agent: RandomAgent) -> tuple[list[Sample], int, int]:
    """Check a session. Return its samples, the number of trained tokens and the number of extending calls."""
    session = await harness.store.session(agent.session.session_id)
    assert session is not None
    calls = await harness.store.calls(session.session_id)
    samples = linearize(session, calls)
    check_calls(harness, calls)
    return samples, check_samples(harness, calls, samples), check_links(agent, calls)


@pytest.mark.timeout(600)
async def test_training_samples_of_random_sessions_equal_engine_emissions(
    harness: ExactnessHarness, tool_call_model: Path
) -> None:
    agents = await harness.run_agents(SESSION_COUNT, "exact")
    checked = [await check_session(harness, agent) for agent in agents]
    samples = [sample for session_samples, _, _ in checked for sample in session_samples]
    trained_tokens = sum(tokens for _, tokens, _ in checked)
    extending_calls = sum(count for _, _, count in checked)

    backend = LocalBackend(
        make_model_config(tool_call_model), LocalBackendConfig(threads=1, micro_batch_tokens=4096)
    )
    gap = compute_max_gap(samples, await backend.forward(samples))
    await backend.close()
    assert gap < LOGPROB_TOLERANCE

    print(
        f"\n{trained_tokens} trained tokens, {extending_calls} calls that extend their history, "
        f"largest logprob gap {gap:.1e}; {dict(harness.event_counts)}"
    )
    # The checks mean little unless each of these events happened often enough.
    assert trained_tokens > 20 * SESSION_COUNT
    assert extending_calls > SESSION_COUNT
    finished_count = sum(emission.is_finished for emission in harness.engine.emissions.values())
    assert finished_count < len(harness.engine.emissions), "no reply was interrupted by a disconnect"
    for event in ("tool call", "finish length", "finish stop", "finish tool_calls", "compacted", "tampered"):
        assert harness.event_counts[event] >= SESSION_COUNT // 50, event


def compute_max_gap(
    samples: list[Sample], logprobs: list[np.ndarray[tuple[int], np.dtype[np.float32]]]
) -> float:
    """Return the largest difference between recorded and computed logprobs of the trained tokens."""
    return max(
        float(np.abs(computed - sample.logprobs)[sample.mask > 0].max())
        for sample, computed in zip(samples, logprobs, strict=True)
    )


# --- weight swaps ---------------------------------------------------------------------------------

SWAP_COUNT = 4


@pytest.mark.timeout(300)
async def test_replies_after_weight_swap_use_only_new_weights(
    harness: ExactnessHarness, tool_call_model: Path, tmp_path: Path
) -> None:
    """Swap weights while sessions run.

    Each token must be recorded with the version that sampled it. A request after a swap must use only the new
    weights, even though the keys and values of its history were computed and cached with the old weights.
    """
    lineage = await train_lineage(tool_call_model, tmp_path, SWAP_COUNT)
    agents_task = asyncio.create_task(harness.run_agents(120, "swapped"))
    for policy in lineage.policies[1:]:
        target = len(harness.engine.emissions) + 60
        while len(harness.engine.emissions) < target and not agents_task.done():  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.005)
        await harness.engine.load(policy)
    agents = await agents_task
    for agent in agents:
        await check_session(harness, agent)

    emissions = [emission for emission in harness.engine.emissions.values() if emission.ids]
    for emission in emissions:
        assert emission.versions == sorted(emission.versions)
        assert emission.versions[0] >= emission.loaded_version
        bounds = zip(emission.versions, emission.newest_versions, strict=True)
        assert all(version <= newest for version, newest in bounds)
    assert sum(emission.versions[0] != emission.versions[-1] for emission in emissions) >= SWAP_COUNT

    for version in range(SWAP_COUNT + 1):
        # These weights were already loaded when the requests arrived, so no others computed the prompts.
        version_emissions = [
            e for e in emissions if e.is_settled and e.loaded_version == version == e.versions[0]
        ]
        assert len(version_emissions) >= 30
        samples = [make_version_sample(emission, version) for emission in version_emissions]
        gap = compute_max_gap(samples, await (await lineage.load_version(version)).forward(samples))
        assert gap < LOGPROB_TOLERANCE
        if version:
            # The gap is much larger with the previous weights, so the check above would detect stale prompts.
            previous_backend = await lineage.load_version(version - 1)
            assert compute_max_gap(samples, await previous_backend.forward(samples)) > 100 * LOGPROB_TOLERANCE
    assert (await harness.engine.status()).cached_tokens > 10_000, (
        "the test requires that cached tokens are reused"
    )
    await lineage.backend.close()


def make_version_sample(emission: Emission, version: int) -> Sample:
    """Return a sample with the prompt and those tokens of the reply that this version sampled."""
    count = emission.versions.count(version)
    sample = make_sample(str(emission.params.seed), emission.prompt, emission.ids[:count])
    sample.logprobs[len(emission.prompt) :] = emission.logprobs[:count]
    return sample


async def test_engine_after_weight_swap_equals_fresh_engine(
    harness: ExactnessHarness, tool_call_model: Path, tmp_path: Path
) -> None:
    """Continue sequences that the old weights sampled, and compare the replies of both engines."""
    lineage = await train_lineage(tool_call_model, tmp_path, 1)
    first_agents = await harness.run_agents(24, "before")
    await harness.engine.load(lineage.policies[1])
    calls = [call for agent in first_agents for call in await harness.store.calls(agent.session.session_id)]
    fresh_engine = LocalEngine(make_model_config(tool_call_model), LocalEngineConfig(threads=1))
    await fresh_engine.load(lineage.policies[1])
    cached_before = (await harness.engine.status()).cached_tokens
    for number, call in enumerate(calls[-24:]):
        params = SamplingParams(max_tokens=24, seed=number)
        prompt = call.sequence.tolist()
        swapped_chunks = [chunk async for chunk in harness.engine.inner.generate(prompt, params)]
        fresh_chunks = [chunk async for chunk in fresh_engine.generate(prompt, params)]
        assert [chunk.token_ids for chunk in swapped_chunks] == [chunk.token_ids for chunk in fresh_chunks]
        actual, expected = (
            [chunk.logprobs[0] for chunk in chunks] for chunks in (swapped_chunks, fresh_chunks)
        )
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    reused = (await harness.engine.status()).cached_tokens - cached_before
    assert reused == (await fresh_engine.status()).cached_tokens, "stale cache entries were reused"
    await fresh_engine.close()
    await lineage.backend.close()
