"""Tests for finding shared prefixes, and for attention that uses them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from instar.engines.local.kv_cache import MIN_SHARED_TOKENS, find_shared_prefixes
from instar.types import SamplingParams
from tests.unit.engines.conformance import TOKENIZER, collect, get_ids, get_logprobs
from tests.unit.engines.test_local import (
    compute_expected_logprobs,
    load_reference_model,
    make_adapter_policy,
    make_engine,
)

PREFIX = TOKENIZER.encode("<|im_start|>system\n" + "Call the tool, then answer. " * 6 + "<|im_end|>\n")
PROMPTS = [PREFIX + TOKENIZER.encode(f"<|im_start|>user\nWhat is {n} plus {n * n}?") for n in range(12)]


def to_arrays(*prompts: list[int]) -> list[np.ndarray]:
    return [np.asarray(prompt, np.int32) for prompt in prompts]


def test_find_shared_prefixes_returns_the_common_prefix() -> None:
    shared = find_shared_prefixes(to_arrays(*PROMPTS), [0] * 12)
    assert shared is not None
    length, groups = shared
    assert length >= len(PREFIX)
    assert all(prompt[:length] == PROMPTS[0][:length] for prompt in PROMPTS)
    assert groups == [list(range(12))]


def test_find_shared_prefixes_groups_rows_by_weights() -> None:
    shared = find_shared_prefixes(to_arrays(*PROMPTS), [0, 1] * 6)
    assert shared is not None
    assert shared[1] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


@pytest.mark.parametrize(
    "prompts",
    [
        [[n] * 100 for n in range(8)],
        [PREFIX[: MIN_SHARED_TOKENS // 2] + [n] * 80 for n in range(8)],
        [PREFIX[:MIN_SHARED_TOKENS]] * 8,
    ],
    ids=["no common prefix", "prefix too short", "no unshared token"],
)
def test_find_shared_prefixes_returns_none_if_too_little_is_shared(prompts: list[list[int]]) -> None:
    assert find_shared_prefixes(to_arrays(*prompts), [0] * len(prompts)) is None


async def test_shared_attention_matches_transformers(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    replies = await asyncio.gather(
        *(collect(engine, prompt, max_tokens=8 + 3 * n, seed=n) for n, prompt in enumerate(PROMPTS))
    )
    await engine.close()
    model = load_reference_model(tiny_model)
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert get_logprobs(reply) == pytest.approx(
            compute_expected_logprobs(model, prompt, get_ids(reply)), abs=1e-4
        )


async def test_rows_started_after_a_load_do_not_share_kv_cache_with_old_weights(
    tiny_model: Path, adapter: Path
) -> None:
    """Rows whose KV cache was computed with the old weights are decoded in the same batch as rows that use
    the new weights."""
    engine = make_engine(tiny_model)
    streams = [engine.generate(p, SamplingParams(max_tokens=120, seed=n)) for n, p in enumerate(PROMPTS)]
    for stream in streams:
        await anext(stream)
    await engine.load(make_adapter_policy(adapter))
    after = await asyncio.gather(
        *(collect(engine, prompt, max_tokens=20, seed=n) for n, prompt in enumerate(PROMPTS))
    )
    assert (await engine.status()).running == len(streams)
    for stream in streams:
        await stream.aclose()
    await engine.close()
    model = load_reference_model(tiny_model, adapter)
    for prompt, reply in zip(PROMPTS, after, strict=True):
        assert get_logprobs(reply) == pytest.approx(
            compute_expected_logprobs(model, prompt, get_ids(reply)), abs=1e-4
        )
