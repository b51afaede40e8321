"""Tests for the local engine with several policies in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.local.engine import LocalEngine
from instar.engines.local.model import EngineModel
from instar.engines.local.requests import SchedulerRequest
from instar.engines.local.scheduler import Scheduler
from instar.engines.stopping import StopRule
from instar.errors import EngineError, PolicyNotFound
from instar.types import Artifact, Policy, PolicyRef, SamplingParams, TokenChunk
from tests.tiny import make_tiny_model
from tests.unit.engines.conformance import (
    TOKENIZER,
    collect,
    get_ids,
    get_logprobs,
    get_versions,
    wait_until_idle,
)
from tests.unit.engines.test_local import (
    PROMPT,
    compute_expected_logprobs,
    load_reference_model,
    make_adapter_policy,
    make_engine,
)
from tests.unit.engines.test_scoring import compute_expected_scores
from tests.unit.engines.test_sharing import PROMPTS as SHARED_PREFIX_PROMPTS

REFS = [PolicyRef("p", version) for version in range(3)]


@pytest.fixture
async def engine(tiny_model: Path, adapters: list[Path]) -> AsyncIterator[LocalEngine]:
    """An engine that serves version 1 and has kept version 2."""
    engine = make_engine(tiny_model, prefill_tokens=16)
    await load_policies(engine, adapters)
    yield engine
    await engine.close()


async def load_policies(engine: LocalEngine, adapters: list[Path]) -> None:
    await engine.load(make_adapter_policy(adapters[0], 1))
    await engine.keep(make_adapter_policy(adapters[1], 2))


async def check_replies(engine: LocalEngine, prompts: list[list[int]], folders: list[Path | None]) -> None:
    """Sample from every prompt with every version at the same time, and compare the logprobs with PEFT."""
    requests = [(prompt, version) for prompt in prompts for version in range(3)]
    replies = await asyncio.gather(
        *(
            collect(engine, prompt, policy=REFS[version], max_tokens=20 + number, seed=number)
            for number, (prompt, version) in enumerate(requests)
        )
    )
    models = [load_reference_model(engine._model.folder, folder) for folder in folders]
    for (prompt, version), chunks in zip(requests, replies, strict=True):
        assert set(get_versions(chunks)) == {version}
        expected = compute_expected_logprobs(models[version], prompt, get_ids(chunks))
        assert get_logprobs(chunks) == pytest.approx(expected, abs=1e-4)


async def test_logprobs_of_a_batch_with_several_adapters_match_peft(
    engine: LocalEngine, adapters: list[Path]
) -> None:
    await check_replies(engine, [PROMPT[:n] for n in (3, 17, 30)], [None, *adapters])


async def test_scores_of_a_named_policy_match_peft(engine: LocalEngine, adapters: list[Path]) -> None:
    tasks = [engine.logprobs(PROMPT[:30], ref) for ref in REFS]
    scores = await asyncio.gather(*tasks, engine.logprobs(PROMPT[:30]))
    folders = [None, *adapters, adapters[0]]
    for values, folder in zip(scores, folders, strict=True):
        model = load_reference_model(engine._model.folder, folder)
        np.testing.assert_allclose(values, compute_expected_scores(model, PROMPT[:30]), atol=1e-4)
    with pytest.raises(PolicyNotFound, match="does not have p@7"):
        await engine.logprobs(PROMPT, PolicyRef("p", 7))


async def test_shared_prefixes_are_attended_per_policy(engine: LocalEngine, adapters: list[Path]) -> None:
    await check_replies(engine, SHARED_PREFIX_PROMPTS, [None, *adapters])


async def test_cached_prompt_is_reused_only_by_the_same_policy(engine: LocalEngine) -> None:
    cached_tokens: list[int] = []
    for ref in (REFS[1], REFS[2], REFS[0], REFS[1], REFS[2], REFS[0], None):
        before = (await engine.status()).cached_tokens
        await collect(engine, PROMPT, policy=ref, max_tokens=2)
        cached_tokens.append((await engine.status()).cached_tokens - before)
    assert cached_tokens == [0] * 3 + [len(PROMPT) - 1] * 4


def test_scheduler_starts_equal_prompts_of_different_policies_together(
    tiny_model: Path, adapters: list[Path]
) -> None:
    """A prompt waits for an equal one that is being computed, but not for one of another policy."""
    model = EngineModel(ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=512))
    scheduler = Scheduler(model, max_batch=8, prefill_tokens=16, kv_tokens=4096, max_adapters=4)
    prompt = np.asarray(PROMPT, np.int32)
    with torch.inference_mode():
        for version, folder in enumerate(adapters, 1):
            scheduler.keep(model.read(make_adapter_policy(folder, version)))
        for ref in (*REFS, *REFS):
            params = SamplingParams(max_tokens=4)
            stop_rule = StopRule(params, 4, (), TOKENIZER)
            scheduler.add(SchedulerRequest(prompt, params, stop_rule, Random(0), 512, policy=ref))
        scheduler.step()
    assert (scheduler.status().running, scheduler.status().waiting) == (3, 3)


async def test_unload_frees_the_cached_prompts_of_the_policy(engine: LocalEngine) -> None:
    await collect(engine, PROMPT, policy=REFS[2], max_tokens=2)
    cached_tokens = engine._scheduler._prefixes.cached_tokens
    await collect(engine, PROMPT, policy=REFS[1], max_tokens=2)
    await engine.unload(REFS[2])
    assert engine._scheduler._prefixes.cached_tokens == cached_tokens > 0


async def test_load_frees_the_cached_prompts_of_the_old_version(
    engine: LocalEngine, adapters: list[Path]
) -> None:
    await collect(engine, PROMPT, policy=REFS[2], max_tokens=2)
    cached_tokens = engine._scheduler._prefixes.cached_tokens
    await collect(engine, PROMPT, max_tokens=2)
    await engine.load(make_adapter_policy(adapters[0], 3))
    assert engine._scheduler._prefixes.cached_tokens == cached_tokens > 0


async def test_cancelled_requests_release_their_policy(engine: LocalEngine) -> None:
    """Requests are cancelled while they wait for a row, and while they are running."""
    params = SamplingParams(max_tokens=400)
    streams = [engine.generate([*PROMPT, n], params, REFS[2]) for n in range(3)]
    for stream in streams:
        await anext(stream)
    engine.set_kv_tokens(0)
    waiting = asyncio.create_task(collect(engine, PROMPT, policy=REFS[2], max_tokens=400))
    async with asyncio.timeout(10):
        while not (await engine.status()).waiting:  # noqa: ASYNC110 - the engine has no event
            await asyncio.sleep(0.001)
    (policy,) = (p for ref, p in engine._scheduler._policies._entries.items() if ref == REFS[2])
    assert policy.request_count == 4
    waiting.cancel()
    for stream in streams:
        await stream.aclose()
    await wait_until_idle(engine)
    assert policy.request_count == 0


async def test_full_weights_cannot_be_kept(engine: LocalEngine, tmp_path: Path, adapters: list[Path]) -> None:
    weights = Artifact("weights", str(make_tiny_model(tmp_path, seed=5)))
    with pytest.raises(EngineError, match="p@3 cannot be kept, because full weights can serve only one"):
        await engine.keep(Policy("p", 3, weights))
    await engine.load(Policy("p", 3, weights))
    assert (await engine.status()).policies == (PolicyRef("p", 3),)
    with pytest.raises(EngineError, match="p@4 cannot be kept"):
        await engine.keep(make_adapter_policy(adapters[0], 4))
    for ref in REFS:
        with pytest.raises(PolicyNotFound, match=r"it has p@3\."):
            await collect(engine, PROMPT, policy=ref)
    assert set(get_versions(await collect(engine, PROMPT, policy=PolicyRef("p", 3), max_tokens=3))) == {3}
    await engine.load(Policy("p", 4, Artifact("base")))
    assert set(get_versions(await collect(engine, PROMPT, policy=REFS[0], max_tokens=3))) == {0}


async def test_full_weights_end_the_requests_that_name_another_policy(
    engine: LocalEngine, tmp_path: Path
) -> None:
    weights = Artifact("weights", str(make_tiny_model(tmp_path, seed=5)))
    params = SamplingParams(max_tokens=400, seed=1)
    named, unnamed = engine.generate(PROMPT, params, REFS[2]), engine.generate(PROMPT, params)
    chunks = [await anext(unnamed)]
    await anext(named)
    await engine.load(Policy("p", 3, weights))
    with pytest.raises(EngineError, match="p@3 has replaced the full weights of p@2 during the request"):
        async for _ in named:
            pass
    chunks += [chunk async for chunk in unnamed]
    assert set(get_versions(chunks)) == {1, 3}


@pytest.mark.parametrize(("dtype", "threads"), [("fp32", 1), ("bf16", 2)])
async def test_deterministic_replies_do_not_depend_on_other_policies_in_the_batch(
    tiny_model: Path, adapters: list[Path], dtype: str, threads: int
) -> None:
    """Alone or together, the tokens and logprobs have the same bits. The adapter with the larger rank comes
    first, because stacking the other one after it would change some of its bits."""
    results: list[list[list[TokenChunk]]] = []
    for is_concurrent in (False, True):
        model = ModelConfig.model_validate(
            {"name": str(tiny_model), "dtype": dtype, "device": "cpu", "max_context": 512}
        )
        engine = LocalEngine(model, LocalEngineConfig(threads=threads, deterministic=True), stop_at_eos=False)
        await load_policies(engine, adapters)
        requests = [
            collect(engine, PROMPT[: 3 + 4 * n], policy=REFS[2 - n % 3], max_tokens=8 + n, seed=n)
            for n in range(9)
        ]
        if is_concurrent:
            results.append(list(await asyncio.gather(*requests)))
        else:
            results.append([await request for request in requests])
        await engine.close()
    assert results[0] == results[1]
