"""Token-exactness, over sessions in which an agent does at random whatever agents do.

The model is tiny, in fp32, and trained to call tools, so that sampling at temperature 1 yields valid calls,
broken ones and plain text. Agents speak to a gateway on a socket, streamed and not, with 0 to 3 tools, 1 to
5 turns, replies cut at 1 to 64 tokens, stop strings, text of several scripts and characters cut in half,
tool results, several choices, the same question again, twice at once, or retried by the client, replies
left half-way, forks, sub-agents, and histories that were tampered with or summed up. What is trained on is
held against what the engine emitted, as an engine around it noted it.
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
from instar.rollout.base import AgentSession
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Call, CallStatus, Channel, Link, Sample, SamplingParams
from tests.integration.random_agent import RandomAgent
from tests.integration.recording_engine import Emission, RecordingEngine, make_emission_key
from tests.integration.tool_call_model import make_sample, model_config, train_lineage, train_tool_call_model
from tests.serving import ADMIN_KEY, running_gateway

SESSIONS = 1000
CONCURRENCY = 32
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def tool_call_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(train_tool_call_model(tmp_path_factory.mktemp("model")))


@dataclass
class ExactnessHarness:
    """Where sessions run: a recorded engine behind a gateway, and the store."""

    engine: RecordingEngine
    store: SqliteStore
    client: GatewayClient
    http: aiohttp.ClientSession
    event_counts: Counter[str]

    async def run_agents(self, sessions: int, name: str) -> list[RandomAgent]:
        """So many sessions, ``CONCURRENCY`` at a time."""
        slots = asyncio.Semaphore(CONCURRENCY)

        async def one(number: int) -> RandomAgent:
            async with slots:
                rng = random.Random(f"{name}/{number}")
                agent = RandomAgent(self.http, await self._open_session(rng), rng)
                await agent.run()
                self.event_counts += agent.event_counts
                return agent

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(sessions)]
        return [task.result() for task in tasks]

    async def _open_session(self, rng: random.Random) -> AgentSession:
        """Some are sampled otherwise; their logprobs are those of the full softmax all the same."""
        sampling = {"temperature": 0.7, "top_p": 0.9} if rng.random() < 0.1 else {}
        return await self.client.open_session(
            channel=Channel.TRAIN, seed=rng.getrandbits(60), sampling=sampling
        )

    def find_emission(self, call: Call) -> Emission:
        return self.engine.emissions[make_emission_key(call.prompt_ids.tolist(), call.params)]


@pytest.fixture
async def harness(tool_call_model: Path, tmp_path: Path) -> AsyncIterator[ExactnessHarness]:
    config = RunConfig(name="exact", model=model_config(tool_call_model))
    local = LocalEngine(config.model, LocalEngineConfig(threads=1, kv_tokens=200_000))
    engine, store = RecordingEngine(local), SqliteStore(tmp_path / "store.db")
    async with running_gateway(config, store, engine) as url:
        client = GatewayClient(url, ADMIN_KEY)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield ExactnessHarness(engine, store, client, http, Counter())
        await client.close()
    await engine.close()
    await store.close()


# --- what must hold of every session ------------------------------------------------------------


def check_calls(harness: ExactnessHarness, calls: list[Call]) -> None:
    """What is recorded is what the engine emitted, to the bit."""
    for call in calls:
        emission = harness.find_emission(call)
        kept = len(call.sampled_ids)
        if call.status is CallStatus.OK:
            assert emission.is_finished
            assert kept == len(emission.ids)
        assert call.sampled_ids.tolist() == emission.ids[:kept]
        assert call.versions.tolist() == emission.versions[:kept]
        np.testing.assert_array_equal(call.logprobs, np.asarray(emission.logprobs[:kept], np.float32))


def check_samples(harness: ExactnessHarness, calls: list[Call], samples: list[Sample]) -> int:
    """Every whole reply is trained, once, behind the very prompt it was sampled from; returns the number
    of trained tokens."""
    by_id = {call.call_id: call for call in calls}
    trained: Counter[str] = Counter()
    for sample in samples:
        masked = np.zeros(len(sample), bool)
        for span in sample.spans:
            where = slice(span.start, span.start + span.length)
            if not sample.mask[where].any():
                continue
            emission = harness.find_emission(by_id[span.call_id])
            assert sample.token_ids[: span.start].tolist() == emission.prompt
            assert sample.token_ids[where].tolist() == emission.ids
            assert sample.versions[where].tolist() == emission.versions
            masked[where] = True
            trained[span.call_id] += 1
        np.testing.assert_array_equal(sample.mask, masked)
    assert trained == Counter(call.call_id for call in calls if call.status is CallStatus.OK)
    return sum(sample.trained_tokens for sample in samples)


def check_links(agent: RandomAgent, calls: list[Call]) -> int:
    """A turn that extends history begins with its tokens, exactly; returns how many do."""
    by_id = {call.call_id: call for call in calls}
    by_request: dict[str, list[Call]] = {}
    for call in calls:
        by_request.setdefault(call.request_id, []).append(call)
    followed = 0
    for sent in agent.requests:
        for call in by_request[sent.request_id]:
            if sent.kind == "fresh":
                assert call.link is not Link.EXTENDS
                continue
            assert call.link in (Link.EXTENDS, Link.SIBLING)
            assert call.parent_id is not None
            parent = by_id[call.parent_id]
            # Replies that read the same cannot be told apart by who sends one back.
            assert parent.messages == by_request[sent.parent or ""][0].messages
            assert call.prompt_ids[: len(parent.sequence)].tolist() == parent.sequence.tolist()
            followed += 1
    return followed


async def check_session(harness: ExactnessHarness, agent: RandomAgent) -> tuple[list[Sample], int, int]:
    session = await harness.store.session(agent.session.session_id)
    assert session is not None
    calls = await harness.store.calls(session.session_id)
    samples = linearize(session, calls)
    check_calls(harness, calls)
    return samples, check_samples(harness, calls, samples), check_links(agent, calls)


@pytest.mark.timeout(600)
async def test_what_is_trained_is_what_was_sampled(harness: ExactnessHarness, tool_call_model: Path) -> None:
    agents = await harness.run_agents(SESSIONS, "exact")
    checked = [await check_session(harness, agent) for agent in agents]
    samples = [sample for found, _, _ in checked for sample in found]
    trained, followed = sum(tokens for _, tokens, _ in checked), sum(turns for _, _, turns in checked)

    backend = LocalBackend(
        model_config(tool_call_model), LocalBackendConfig(threads=1, micro_batch_tokens=4096)
    )
    gap = compute_max_gap(samples, await backend.forward(samples))
    await backend.close()
    assert gap < TOLERANCE

    print(
        f"\n{trained} tokens trained, {followed} turns followed, largest gap {gap:.1e}; "
        f"{dict(harness.event_counts)}"
    )
    # That all of it really happened, and often.
    assert trained > 20 * SESSIONS
    assert followed > SESSIONS
    finished = sum(emission.is_finished for emission in harness.engine.emissions.values())
    assert finished < len(harness.engine.emissions), "no client went away in time"
    for thing in ("tool call", "finish length", "finish stop", "finish tool_calls", "compacted", "tampered"):
        assert harness.event_counts[thing] >= SESSIONS // 50, thing


def compute_max_gap(
    samples: list[Sample], logprobs: list[np.ndarray[tuple[int], np.dtype[np.float32]]]
) -> float:
    """Between recorded and computed logprobs of the trained tokens."""
    return max(
        float(np.abs(computed - sample.logprobs)[sample.mask > 0].max())
        for sample, computed in zip(samples, logprobs, strict=True)
    )


# --- other weights, meanwhile -------------------------------------------------------------------

VERSIONS = 4


@pytest.mark.timeout(300)
async def test_swapped_weights_leave_no_trace(
    harness: ExactnessHarness, tool_call_model: Path, tmp_path: Path
) -> None:
    """Weights are swapped while sessions run. Each token is stamped with the weights that made it, and what
    is asked after a swap is computed by the new ones alone, though its history was read by the old."""
    lineage = await train_lineage(tool_call_model, tmp_path, VERSIONS)
    running = asyncio.create_task(harness.run_agents(120, "swapped"))
    for policy in lineage.policies[1:]:
        enough = len(harness.engine.emissions) + 60
        while len(harness.engine.emissions) < enough and not running.done():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
        await harness.engine.load(policy)
    agents = await running
    for agent in agents:
        await check_session(harness, agent)

    emissions = [emission for emission in harness.engine.emissions.values() if emission.ids]
    for emission in emissions:
        assert emission.versions == sorted(emission.versions)
        assert emission.versions[0] >= emission.loaded_version
        bounds = zip(emission.versions, emission.newest_versions, strict=True)
        assert all(version <= newest for version, newest in bounds)
    assert sum(emission.versions[0] != emission.versions[-1] for emission in emissions) >= VERSIONS

    for version in range(VERSIONS + 1):
        # Asked when these weights were in place: tokens stamped with them had no others behind them.
        pure = [e for e in emissions if e.is_settled and e.loaded_version == version == e.versions[0]]
        assert len(pure) >= 30
        samples = [make_version_sample(emission, version) for emission in pure]
        gap = compute_max_gap(samples, await (await lineage.load_version(version)).forward(samples))
        assert gap < TOLERANCE
        if version:
            # The proof would see it if a prompt had been read by the weights before.
            stale = compute_max_gap(samples, await (await lineage.load_version(version - 1)).forward(samples))
            assert stale > 100 * TOLERANCE
    assert (await harness.engine.status()).cached_tokens > 10_000, "nothing was reused, so nothing was proved"
    await lineage.backend.close()


def make_version_sample(emission: Emission, version: int) -> Sample:
    """The tokens of a reply that this version made, behind its prompt."""
    count = emission.versions.count(version)
    sample = make_sample(str(emission.params.seed), emission.prompt, emission.ids[:count])
    sample.logprobs[len(emission.prompt) :] = emission.logprobs[:count]
    return sample


async def test_a_swapped_engine_equals_a_fresh_one(
    harness: ExactnessHarness, tool_call_model: Path, tmp_path: Path
) -> None:
    """The second turn of sessions whose first was read by other weights, token for token."""
    lineage = await train_lineage(tool_call_model, tmp_path, 1)
    first = await harness.run_agents(24, "before")
    await harness.engine.load(lineage.policies[1])
    calls = [call for agent in first for call in await harness.store.calls(agent.session.session_id)]
    fresh = LocalEngine(model_config(tool_call_model), LocalEngineConfig(threads=1))
    await fresh.load(lineage.policies[1])
    before = (await harness.engine.status()).cached_tokens
    for number, call in enumerate(calls[-24:]):
        params = SamplingParams(max_tokens=24, seed=number)
        prompt = call.sequence.tolist()
        swapped = [chunk async for chunk in harness.engine.engine.generate(prompt, params)]
        anew = [chunk async for chunk in fresh.generate(prompt, params)]
        assert [chunk.token_ids for chunk in swapped] == [chunk.token_ids for chunk in anew]
        ours, theirs = ([chunk.logprobs[0] for chunk in chunks] for chunks in (swapped, anew))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    reused = (await harness.engine.status()).cached_tokens - before
    assert reused == (await fresh.status()).cached_tokens
    await fresh.close()
    await lineage.backend.close()
