"""The batches on which backends are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from instar.types import Sample

VOCAB_SIZE = 300
"""Token ids in the batches are below this number. All checked models have these tokens."""


def make_sample(key: str, ids: Sequence[int], trained_from: int, seed: int = 0, **overrides: Any) -> Sample:
    """Return a sample with random logprobs and advantages. Tokens from index ``trained_from`` are trained."""
    rng = np.random.default_rng([seed, len(ids)])
    mask = np.zeros(len(ids), np.float32)
    mask[trained_from:] = 1
    fields: dict[str, Any] = {
        "mask": mask,
        "logprobs": np.where(mask > 0, rng.normal(-5, 0.5, len(ids)), np.nan).astype(np.float32),
        "advantages": np.where(mask > 0, rng.normal(0, 0.05, len(ids)), 0).astype(np.float32),
        "versions": np.where(mask > 0, 0, -1).astype(np.int32),
    }
    return Sample(key, "s", np.asarray(ids, np.int32), **(fields | overrides))


def make_token_generator(seed: int) -> Callable[[int], list[int]]:
    """Return a function that generates a given number of random token ids."""
    rng = np.random.default_rng(seed)
    return lambda count: rng.integers(3, VOCAB_SIZE, count).tolist()


def make_tree_samples(seed: int = 0) -> list[Sample]:
    """Return groups of samples. All groups share a prefix, and the samples in a group share a longer one. Two
    samples have the same tokens, one is a prefix of another, and one shares no prefix with the others."""
    draw_tokens = make_token_generator(seed)
    common = draw_tokens(33)
    samples: list[Sample] = []
    for group in range(3):
        prefix, start = common + draw_tokens(20 * group + 2), draw_tokens(5)
        for slot in range(3):
            reply = start[: slot + 2] + draw_tokens(9 + 4 * slot)
            samples.append(make_sample(f"g{group}.{slot}", prefix + reply, len(prefix), seed + slot))
    longest = samples[-1].token_ids.tolist()
    samples.append(make_sample("twin", longest, len(longest) - 12, seed + 7))
    samples.append(make_sample("prefix", longest[:-4], len(longest) - 9, seed + 8))
    samples.append(make_sample("alone", draw_tokens(6), 1, seed + 9))
    # One reply contains tool output, which is not trained on.
    mask_with_gap = samples[1].mask.copy()
    mask_with_gap[-6:-3] = 0
    samples[1] = make_sample("gap", samples[1].token_ids.tolist(), len(common), seed, mask=mask_with_gap)
    return samples


def make_edge_samples(context: int, seed: int = 3) -> list[Sample]:
    draw_tokens = make_token_generator(seed)
    partly_zero = make_sample("some zero", draw_tokens(20), 4, seed)
    partly_zero.advantages[8:12] = 0
    return [
        make_sample("one token", draw_tokens(1), 1, seed),
        make_sample("nothing trained", draw_tokens(12), 12, seed),
        make_sample("all zero", draw_tokens(16), 5, seed, advantages=np.zeros(16, np.float32)),
        partly_zero,
        make_sample("two tokens", draw_tokens(2), 1, seed),
        make_sample("full context", draw_tokens(context), context - 40, seed),
    ]
