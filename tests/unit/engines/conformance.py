"""Tests that every engine must pass. Subclasses of EngineConformance provide an ``engine`` fixture.

The engine must serve a model with the tiny tokenizer, and its greedy reply to ``prompt`` must not end before
``max_tokens``. If it serves several policies, it must keep at most four. ``seeds_matter`` is True if replies
depend on the seed. A reply of ``long_reply_tokens`` must still be running when the test sends its next
request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from instar.engines.base import Engine, Prompt
from instar.errors import EngineError, EngineUnavailable, PolicyNotFound, PromptTooLong
from instar.types import Artifact, Policy, PolicyRef, SamplingParams, TokenChunk
from tests.tiny import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


async def collect(
    engine: Engine, prompt: Prompt, *, policy: PolicyRef | None = None, **params: object
) -> list[TokenChunk]:
    sampling_params = SamplingParams(**params)  # type: ignore[arg-type]
    return [chunk async for chunk in engine.generate(prompt, sampling_params, policy)]


def get_ids(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def get_logprobs(chunks: list[TokenChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]


def get_versions(chunks: list[TokenChunk]) -> list[int]:
    return [version for chunk in chunks for version in chunk.versions]


async def read_until_version(
    stream: AsyncGenerator[TokenChunk, None], version: int, token_count: int
) -> list[TokenChunk]:
    """Read a reply until it has ``token_count`` tokens of ``version``, then cancel it."""
    chunks: list[TokenChunk] = []
    async with aclosing(stream):
        async for chunk in stream:
            chunks.append(chunk)
            if get_versions(chunks).count(version) >= token_count:
                break
    return chunks


async def wait_until_idle(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while (status := await engine.status()).running or status.waiting:  # noqa: ASYNC110 - the engine may be remote
            await asyncio.sleep(0.01)


class EngineConformance:
    seeds_matter = True
    max_context = 256
    long_reply_tokens = 200

    @pytest.fixture
    def prompt(self) -> list[int]:
        return TOKENIZER.encode("What is 615 plus 278?")

    async def test_info_describes_the_engine(self, engine: Engine) -> None:
        assert engine.info.vocab_size == len(TOKENIZER)
        assert engine.info.max_context == self.max_context
        assert {"base", "adapter", "weights"} <= set(engine.info.artifacts)

    async def test_generate_streams_aligned_chunks_with_one_finish_reason(
        self, engine: Engine, prompt: list[int]
    ) -> None:
        chunks = await collect(engine, prompt, max_tokens=6, temperature=0)
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        for chunk in chunks:
            assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions) >= 1
            assert all(value <= 0 for value in chunk.logprobs)
        assert len(get_ids(chunks)) == 6

    async def test_generate_streams_tokens_or_yields_one_chunk(
        self, engine: Engine, prompt: list[int]
    ) -> None:
        if not engine.info.streams:
            assert len(await collect(engine, prompt, max_tokens=20, temperature=0)) == 1
            return
        # On a busy machine, a server may send all tokens of a short reply at once.
        params = SamplingParams(max_tokens=self.long_reply_tokens, temperature=0)
        stream = engine.generate(prompt, params)
        first = await anext(stream)
        assert first.finish_reason is None
        rest = [chunk async for chunk in stream]
        assert rest[-1].finish_reason == "length"

    async def test_behavior_logprobs_are_set_if_sampling_modifies_the_distribution(
        self, engine: Engine, prompt: list[int]
    ) -> None:
        plain = await collect(engine, prompt, max_tokens=3, seed=1)
        greedy = await collect(engine, prompt, max_tokens=3, temperature=0)
        assert all(c.behavior_logprobs is None for c in plain)
        assert all(c.behavior_logprobs and len(c.behavior_logprobs) == len(c.token_ids) for c in greedy)

    async def test_greedy_replies_are_reproducible(self, engine: Engine, prompt: list[int]) -> None:
        first = await collect(engine, prompt, max_tokens=6, temperature=0)
        second = await collect(engine, prompt, max_tokens=6, temperature=0)
        assert get_ids(first) == get_ids(second)
        assert get_logprobs(first) == pytest.approx(get_logprobs(second), abs=1e-5)

    async def test_seeded_replies_are_reproducible(self, engine: Engine, prompt: list[int]) -> None:
        first = await collect(engine, prompt, max_tokens=6, seed=7)
        second = await collect(engine, prompt, max_tokens=6, seed=7)
        assert get_ids(first) == get_ids(second)
        if self.seeds_matter:
            others = [get_ids(await collect(engine, prompt, max_tokens=6, seed=s)) for s in range(8, 12)]
            assert any(other != get_ids(first) for other in others)

    async def test_stop_token_ends_the_reply(self, engine: Engine, prompt: list[int]) -> None:
        ids = get_ids(await collect(engine, prompt, max_tokens=6, temperature=0))
        stopped = await collect(engine, prompt, max_tokens=6, temperature=0, stop_token_ids=(ids[3],))
        assert get_ids(stopped) == ids[: ids.index(ids[3]) + 1]
        assert stopped[-1].finish_reason == "stop"
        assert stopped[-1].stop is None

    async def test_stop_string_across_tokens_ends_the_reply(self, engine: Engine, prompt: list[int]) -> None:
        ids = get_ids(await collect(engine, prompt, max_tokens=6, temperature=0))
        texts = [TOKENIZER.decode(ids[:n]) for n in range(7)]
        # The last text that ends with a new, complete character.
        text = [b for a, b in pairwise(texts) if not b.endswith("\ufffd") and b != a][-1]
        stop = text[-3:] if "\ufffd" not in text[-3:] else text[-1:]
        stopped = await collect(engine, prompt, max_tokens=6, temperature=0, stop=("absent", stop))
        token_count = next(n for n in range(1, 7) if stop in texts[n])
        assert get_ids(stopped) == ids[:token_count]
        assert (stopped[-1].finish_reason, stopped[-1].stop) == ("stop", stop)

    async def test_closed_stream_frees_the_engine(self, engine: Engine, prompt: list[int]) -> None:
        tokens_before = (await engine.status()).generated_tokens
        stream = engine.generate(prompt, SamplingParams(max_tokens=self.long_reply_tokens, temperature=0))
        await anext(stream)
        assert (await engine.status()).running == 1
        await stream.aclose()  # type: ignore[attr-defined]
        await wait_until_idle(engine)
        tokens_after = (await engine.status()).generated_tokens
        await asyncio.sleep(0.1)
        assert (await engine.status()).generated_tokens == tokens_after
        assert tokens_after < tokens_before + self.long_reply_tokens - 10

    async def test_cancelled_task_frees_the_engine(self, engine: Engine, prompt: list[int]) -> None:
        task = asyncio.create_task(collect(engine, prompt, max_tokens=self.long_reply_tokens, temperature=0))
        async with asyncio.timeout(10):
            while (await engine.status()).running == 0:  # noqa: ASYNC110 - the engine may be remote
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_idle(engine)

    async def test_concurrent_replies_match_sequential_ones(self, engine: Engine, prompt: list[int]) -> None:
        prompts = [prompt + TOKENIZER.encode("ab" * n) for n in range(12)]
        sequential = [
            get_ids(await collect(engine, p, max_tokens=3 + n, temperature=0)) for n, p in enumerate(prompts)
        ]
        concurrent = await asyncio.gather(
            *(collect(engine, p, max_tokens=3 + n, temperature=0) for n, p in enumerate(prompts))
        )
        assert [get_ids(chunks) for chunks in concurrent] == sequential

    async def test_load_changes_the_version_of_later_tokens(self, engine: Engine, prompt: list[int]) -> None:
        assert set(get_versions(await collect(engine, prompt, max_tokens=3, temperature=0))) == {0}
        stream = engine.generate(prompt, SamplingParams(max_tokens=self.long_reply_tokens, temperature=0))
        chunks = [await anext(stream)]
        await engine.load(Policy("p", 5, Artifact("base")))
        chunks += await read_until_version(stream, 5, token_count=10)
        versions = get_versions(chunks)
        assert versions == sorted(versions)
        assert (versions[0], versions[-1]) == (0, 5)
        assert (await engine.status()).version == 5
        assert set(get_versions(await collect(engine, prompt, max_tokens=3, temperature=0))) == {5}

    async def test_load_rejects_unsupported_artifacts(self, engine: Engine) -> None:
        with pytest.raises(EngineError, match="not live"):
            await engine.load(Policy("p", 6, Artifact("live", "somewhere")))
        assert (await engine.status()).version == 0

    async def test_reply_ends_at_the_context_limit(self, engine: Engine, prompt: list[int]) -> None:
        long_prompt = (prompt * engine.info.max_context)[: engine.info.max_context - 3]
        chunks = await collect(engine, long_prompt, max_tokens=50, temperature=0)
        assert chunks[-1].finish_reason == "length"
        assert len(get_ids(chunks)) == 3

    async def test_logprobs_scores_prompt_tokens(self, engine: Engine, prompt: list[int]) -> None:
        if not engine.info.can_score:
            with pytest.raises(EngineError, match="prompt logprobs"):
                await engine.logprobs(prompt)
            return
        long_prompt = (prompt * engine.info.max_context)[: engine.info.max_context]
        complete, prefix, single, repeated = await asyncio.gather(
            engine.logprobs(long_prompt),
            engine.logprobs(long_prompt[:40]),
            engine.logprobs([7]),
            engine.logprobs(long_prompt),
        )
        assert complete.shape == (engine.info.max_context,)
        assert np.isnan(complete[0])
        assert np.isnan(single).tolist() == [True]
        assert (complete[1:] < 0).all()
        np.testing.assert_allclose(prefix, complete[:40], atol=1e-5, err_msg="scores depend on later tokens")
        np.testing.assert_allclose(repeated, complete, atol=1e-5)
        await wait_until_idle(engine)

    async def test_logprobs_rejects_invalid_prompts(self, engine: Engine, prompt: list[int]) -> None:
        with pytest.raises(PromptTooLong if engine.info.can_score else EngineError):
            await engine.logprobs((prompt * engine.info.max_context)[: engine.info.max_context + 1])
        for invalid_ids in ([], [-1], [engine.info.vocab_size]):
            with pytest.raises(EngineError):
                await engine.logprobs(invalid_ids)

    async def test_generate_rejects_a_prompt_that_fills_the_context(
        self, engine: Engine, prompt: list[int]
    ) -> None:
        with pytest.raises(PromptTooLong):
            await collect(engine, (prompt * engine.info.max_context)[: engine.info.max_context], max_tokens=1)

    async def test_generate_accepts_arrays_and_lists(self, engine: Engine, prompt: list[int]) -> None:
        expected = await collect(engine, prompt, max_tokens=6, temperature=0)
        for dtype in (np.int32, np.int64):
            array = np.asarray(prompt, dtype)
            assert get_ids(await collect(engine, array, max_tokens=6, temperature=0)) == get_ids(expected)

    async def test_engine_without_support_rejects_named_policies(
        self, engine: Engine, prompt: list[int]
    ) -> None:
        if engine.info.serves_several_policies:
            return
        policy = Policy("p", 1, Artifact("base"))
        for attempt in (collect(engine, prompt, policy=policy.ref), engine.keep(policy)):
            with pytest.raises(PolicyNotFound, match="only one policy version"):
                await attempt

    async def test_for_session_returns_a_working_engine(self, engine: Engine, prompt: list[int]) -> None:
        routed = engine.for_session("sess-1")
        assert routed.info == engine.info
        assert await collect(routed, prompt, max_tokens=2, temperature=0)

    @pytest.mark.parametrize(
        ("ids", "params"),
        [
            ([], {}),
            ([-1], {}),
            ([10**6], {}),
            ([2**32 + 1], {}),
            ([2**80], {}),
            ([1], {"max_tokens": 0}),
            ([1], {"temperature": -1.0}),
            ([1], {"top_p": 0.0}),
            ([1], {"top_k": -1}),
            ([1], {"stop": ("",)}),
        ],
    )
    async def test_generate_rejects_invalid_input(
        self, engine: Engine, ids: list[int], params: dict[str, object]
    ) -> None:
        with pytest.raises(EngineError):
            await collect(engine, ids, **params)
        assert len(get_ids(await collect(engine, [1, 2, 3], max_tokens=1))) == 1


class MultiPolicyConformance(EngineConformance):
    """Further tests for engines that serve several policies."""

    @pytest.fixture
    def artifacts(self, adapters: list[Path]) -> list[Artifact]:
        """Two artifacts with different weights."""
        return [Artifact("adapter", str(path)) for path in adapters]

    @pytest.fixture
    def policies(self, artifacts: list[Artifact]) -> list[Policy]:
        return [Policy("p", version, artifact) for version, artifact in enumerate(artifacts, 1)]

    async def test_policies_in_one_batch_reply_as_each_does_alone(
        self, engine: Engine, prompt: list[int], policies: list[Policy]
    ) -> None:
        await engine.load(policies[0])
        await engine.keep(policies[1])
        refs = [None, PolicyRef("p", 0), PolicyRef("p", 1), PolicyRef("p", 2)]
        requests = [(prompt + TOKENIZER.encode("ab" * n), refs[n % 4], 6 + n) for n in range(12)]
        alone = [await collect(engine, p, policy=r, max_tokens=n, temperature=0) for p, r, n in requests]
        together = await asyncio.gather(
            *(collect(engine, p, policy=r, max_tokens=n, temperature=0) for p, r, n in requests)
        )
        for (_, ref, length), expected, actual in zip(requests, alone, together, strict=True):
            assert get_ids(actual) == get_ids(expected)
            assert get_logprobs(actual) == pytest.approx(get_logprobs(expected), abs=1e-5)
            assert get_versions(actual) == [1 if ref is None else ref.version] * length

    async def test_named_policy_replies_to_the_end_after_a_load(
        self, engine: Engine, prompt: list[int], policies: list[Policy]
    ) -> None:
        await engine.load(policies[0])
        params = SamplingParams(max_tokens=self.long_reply_tokens, temperature=0)
        stream = engine.generate(prompt, params, policies[0].ref)
        chunks = [await anext(stream)]
        await engine.load(policies[1])
        assert set(get_versions(await collect(engine, prompt, max_tokens=3, temperature=0))) == {2}
        chunks += [chunk async for chunk in stream]
        assert get_versions(chunks) == [1] * self.long_reply_tokens

    async def test_kept_policies_are_listed_and_do_not_change_the_served_one(
        self, engine: Engine, prompt: list[int], policies: list[Policy]
    ) -> None:
        for policy in (*policies, policies[0]):
            await engine.keep(policy)
        status = await engine.status()
        assert (status.version, status.policies) == (0, (PolicyRef("p", 1), PolicyRef("p", 2)))
        assert set(get_versions(await collect(engine, prompt, max_tokens=3, temperature=0))) == {0}

    async def test_logprobs_can_name_a_loaded_policy(
        self, engine: Engine, prompt: list[int], policies: list[Policy]
    ) -> None:
        if not engine.info.can_score:
            return
        await engine.load(policies[0])
        await engine.keep(policies[1])
        served, named = [await engine.logprobs(prompt, ref) for ref in (None, policies[0].ref)]
        np.testing.assert_allclose(named, served, atol=1e-5)
        assert len(await engine.logprobs(prompt, policies[1].ref)) == len(prompt)
        with pytest.raises(PolicyNotFound, match="does not have p@7"):
            await engine.logprobs(prompt, PolicyRef("p", 7))

    async def test_generate_raises_policy_not_found_for_an_unknown_policy(
        self, engine: Engine, prompt: list[int], policies: list[Policy]
    ) -> None:
        await engine.keep(policies[0])
        for ref, names in ((PolicyRef("p", 7), "p@0, p@1"), (PolicyRef("other", 1), "other@0")):
            with pytest.raises(PolicyNotFound, match=f"does not have {ref}; it has {names}"):
                await collect(engine, prompt, policy=ref, max_tokens=3)
        await wait_until_idle(engine)

    async def test_unloaded_policy_finishes_its_requests(
        self, engine: Engine, prompt: list[int], policies: list[Policy]
    ) -> None:
        await engine.keep(policies[0])
        params = SamplingParams(max_tokens=self.long_reply_tokens, temperature=0)
        expected = await collect(
            engine, prompt, policy=policies[0].ref, max_tokens=self.long_reply_tokens, temperature=0
        )
        stream = engine.generate(prompt, params, policies[0].ref)
        chunks = [await anext(stream)]
        await engine.unload(policies[0].ref)
        with pytest.raises(PolicyNotFound):
            await collect(engine, prompt, policy=policies[0].ref, max_tokens=3)
        chunks += [chunk async for chunk in stream]
        assert get_ids(chunks) == get_ids(expected)
        assert set(get_versions(chunks)) == {1}
        assert (await engine.status()).policies == ()

    async def test_unload_rejects_unknown_and_served_policies(
        self, engine: Engine, policies: list[Policy]
    ) -> None:
        await engine.load(policies[0])
        with pytest.raises(PolicyNotFound):
            await engine.unload(PolicyRef("p", 7))
        with pytest.raises(EngineError, match="served policy"):
            await engine.unload(policies[0].ref)

    async def test_least_recently_used_policy_is_unloaded_at_the_limit(
        self, engine: Engine, prompt: list[int], artifacts: list[Artifact]
    ) -> None:
        artifact = artifacts[0]
        await engine.load(Policy("p", 1, artifact))
        for version in (2, 3, 4):
            await engine.keep(Policy("p", version, artifact))
        for _ in range(2):  # one for each engine of a pool
            await collect(engine, prompt, policy=PolicyRef("p", 2), max_tokens=2)
        await engine.keep(Policy("p", 5, artifact))
        assert [ref.version for ref in (await engine.status()).policies] == [1, 2, 4, 5]
        await engine.load(Policy("p", 6, artifact))
        assert [ref.version for ref in (await engine.status()).policies] == [2, 4, 5, 6]
        with pytest.raises(PolicyNotFound):
            await collect(engine, prompt, policy=PolicyRef("p", 3), max_tokens=2)


class CloudConformance(MultiPolicyConformance):
    """The tests for engines of training services. Subclasses provide an ``artifacts`` fixture. Replies arrive
    as one chunk, so tests that read part of a reply are overridden."""

    async def test_info_describes_the_engine(self, engine: Engine) -> None:
        info = engine.info
        assert (info.vocab_size, info.max_context) == (len(TOKENIZER), self.max_context)
        assert info.artifacts == ("base", "remote")
        assert not info.streams
        assert not info.versions_per_token

    async def test_closed_stream_frees_the_engine(self, engine: Engine, prompt: list[int]) -> None:
        stream = engine.generate(prompt, SamplingParams(max_tokens=200, temperature=0))
        pending_task = asyncio.ensure_future(anext(stream))
        while not (await engine.status()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        pending_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending_task
        status = await engine.status()
        assert (status.running, status.waiting, status.generated_tokens) == (0, 0, 0)

    async def test_load_changes_the_version_of_later_tokens(self, engine: Engine, prompt: list[int]) -> None:
        assert set(get_versions(await collect(engine, prompt, max_tokens=3))) == {0}
        await engine.load(Policy("p", 5, Artifact("base")))
        assert set(get_versions(await collect(engine, prompt, max_tokens=3))) == {5}
        assert (await engine.status()).version == 5

    async def test_load_rejects_unsupported_artifacts(self, engine: Engine) -> None:
        with pytest.raises(EngineError, match="not adapter"):
            await engine.load(Policy("p", 6, Artifact("adapter", "/somewhere")))
        assert (await engine.status()).version == 0

    async def test_renewed_policy_is_sampled_at_its_new_path(
        self, engine: Engine, prompt: list[int], artifacts: list[Artifact]
    ) -> None:
        """A version keeps its weights when it is exported again. Different ones show which path is used."""
        old, new = artifacts
        assert old.expires_at is not None
        new = msgspec.structs.replace(new, expires_at=old.expires_at + 1)
        await engine.keep(Policy("p", 1, new))
        expected = await collect(engine, prompt, policy=PolicyRef("p", 1), max_tokens=6, temperature=0)
        await engine.unload(PolicyRef("p", 1))
        await engine.keep(Policy("p", 1, old))
        before = await collect(engine, prompt, policy=PolicyRef("p", 1), max_tokens=6, temperature=0)
        assert get_logprobs(before) != get_logprobs(expected)
        stream = engine.generate(prompt, SamplingParams(max_tokens=100, temperature=0), PolicyRef("p", 1))
        in_flight = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await engine.keep(Policy("p", 1, new))
        await engine.keep(Policy("p", 1, old))  # from a process that has not read the new path yet
        for number in range(2):
            after = await collect(engine, prompt, policy=PolicyRef("p", 1), max_tokens=6, temperature=0)
            assert get_logprobs(after) == pytest.approx(get_logprobs(expected), abs=1e-5), number
        assert set((await in_flight).versions) == {1}
        assert (await engine.status()).policies == (PolicyRef("p", 1),)

    async def test_expired_and_missing_samplers_are_rejected_without_disturbing_others(
        self, engine: Engine, prompt: list[int], policies: list[Policy]
    ) -> None:
        await engine.keep(policies[0])
        in_flight = asyncio.create_task(collect(engine, prompt, policy=policies[0].ref, max_tokens=150))
        await asyncio.sleep(0.05)
        expired = msgspec.structs.replace(policies[1].artifact, expires_at=time.time() - 1)
        missing = Artifact("remote", policies[1].artifact.path + "-missing", time.time() + 100)
        for artifact, message in ((expired, "p@2 has expired"), (missing, "missing")):
            with pytest.raises(EngineError, match=message) as caught:
                await engine.keep(Policy("p", 2, artifact))
            assert not isinstance(caught.value, EngineUnavailable), "the engine itself is available"
        assert set(get_versions(await in_flight)) == {1}
        assert (await engine.status()).policies == (PolicyRef("p", 1),)
        for version in range(10, 20):  # more than the engine keeps
            await engine.keep(Policy("p", version, policies[0].artifact))
        kept = (await engine.status()).policies
        for artifact in (expired, missing):
            with pytest.raises(EngineError):
                await engine.keep(Policy("p", 2, artifact))
        assert (await engine.status()).policies == kept, "none was unloaded for them"
