"""Tests for prompt scoring with the local engine, compared with transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instar.engines.local.engine import LocalEngine
from instar.errors import EngineUnavailable
from instar.types import Artifact, Policy
from tests.unit.engines.conformance import collect, get_ids, get_logprobs, wait_until_idle
from tests.unit.engines.test_local import (
    PROMPT,
    compute_expected_logprobs,
    engine,
    load_reference_model,
    make_adapter_policy,
)

__all__ = ["engine"]

PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(3, 300, n)] for n in (2, 15, 16, 17, 60, 130)]


def compute_expected_scores(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [np.nan] + [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]


async def test_scores_match_transformers_while_replies_are_running(
    engine: LocalEngine, tiny_model: Path
) -> None:
    """Prompts are scored in chunks of 16 tokens while replies start and end."""
    model = load_reference_model(tiny_model)
    replies = [asyncio.create_task(collect(engine, PROMPT, max_tokens=5 + n, seed=n)) for n in range(4)]
    scores = await asyncio.gather(*map(engine.logprobs, PROMPTS), *map(engine.logprobs, reversed(PROMPTS)))
    for ids, logprobs in zip(PROMPTS + PROMPTS[::-1], scores, strict=True):
        np.testing.assert_allclose(logprobs, compute_expected_scores(model, ids), atol=1e-4)
    for chunks in await asyncio.gather(*replies):
        expected = compute_expected_logprobs(model, PROMPT, get_ids(chunks))
        assert get_logprobs(chunks) == pytest.approx(expected, abs=1e-4)
    await wait_until_idle(engine)


async def test_scores_use_the_served_policy(engine: LocalEngine, tiny_model: Path, adapter: Path) -> None:
    """A policy loaded during scoring applies to all tokens of the prompt."""
    ids = PROMPTS[-1] * 3
    scoring_task = asyncio.create_task(engine.logprobs(ids))
    async with asyncio.timeout(10):
        while not (await engine.status()).running:  # noqa: ASYNC110 - the engine's thread has no event
            await asyncio.sleep(0)
    await engine.load(make_adapter_policy(adapter))
    adapted = compute_expected_scores(load_reference_model(tiny_model, adapter), ids)
    np.testing.assert_allclose(await scoring_task, adapted, atol=1e-4)
    np.testing.assert_allclose(await engine.logprobs(ids), adapted, atol=1e-4)
    await engine.load(Policy("p", 2, Artifact("base")))
    np.testing.assert_allclose(
        await engine.logprobs(ids), compute_expected_scores(load_reference_model(tiny_model), ids), atol=1e-4
    )


async def test_scoring_does_not_reuse_cached_prefixes(engine: LocalEngine, tiny_model: Path) -> None:
    reply = get_ids(await collect(engine, PROMPT, max_tokens=8, seed=1))
    ids = PROMPT + reply
    np.testing.assert_allclose(
        await engine.logprobs(ids), compute_expected_scores(load_reference_model(tiny_model), ids), atol=1e-4
    )


async def test_cancelled_scoring_frees_the_engine(engine: LocalEngine) -> None:
    tasks = [asyncio.create_task(engine.logprobs(PROMPTS[-1] * 3)) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wait_until_idle(engine)
    assert len(await engine.logprobs(PROMPTS[0])) == 2


async def test_logprobs_raises_unavailable_if_the_engine_is_closed(engine: LocalEngine) -> None:
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await engine.logprobs(PROMPT)
