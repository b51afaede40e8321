"""Tests for the prefix cache. Each fake key and value encodes all tokens up to its position."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from instar.engines.local.kv_cache import PrefixCache
from instar.types import Ids

MAX_LENGTH = 12
KEY = 1
"""The key of the policy."""


def to_ids(*ids: int) -> Ids:
    return np.asarray(ids, np.int32)


def make_kv(ids: Ids) -> Tensor:
    """Return a [1, 1, 1, tokens, 1] tensor. Each value encodes the tokens up to its position as a number."""
    values: list[int] = []
    value = 1
    for token in ids.tolist():
        value = value * 4 + token
        values.append(value)
    return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1, 1)


def match(cache: PrefixCache, ids: Ids) -> Tensor:
    pieces = [kv[:, :, :, :count] for kv, count in cache.match(KEY, ids)]
    return torch.cat([make_kv(ids[:0]), *pieces], 3)


def insert(cache: PrefixCache, ids: Ids) -> None:
    # A row ends with unused capacity, which has arbitrary values.
    unused = torch.full((1, 1, 1, MAX_LENGTH, 1), -1.0, dtype=torch.float64)
    cache.insert(KEY, ids, torch.cat([make_kv(ids), unused], 3))


def test_prefix_cache_splits_a_node_that_has_a_child() -> None:
    """The node 1 2 3 already has a child when a sequence that diverges after 1 2 splits it."""
    cache = PrefixCache()
    insert(cache, to_ids(1, 2, 3))
    insert(cache, to_ids(1, 2, 3, 0, 1))
    insert(cache, to_ids(1, 2, 0, 3))
    for ids in (to_ids(1, 2, 3, 0, 3), to_ids(1, 2, 0, 3)):
        kv = match(cache, ids)
        assert torch.equal(kv, make_kv(ids[: kv.shape[3]]))
    assert cache.match_length(KEY, to_ids(1, 2, 0, 3)) == 4


@pytest.mark.parametrize("seed", range(20))
def test_prefix_cache_returns_values_of_the_same_prefix(seed: int) -> None:
    rng = Random(seed)
    cache = PrefixCache()
    inserted: set[tuple[int, ...]] = set()
    for _ in range(200):
        ids = to_ids(*(rng.randrange(2 + seed % 2) for _ in range(rng.randrange(1, MAX_LENGTH))))
        kv = match(cache, ids)
        assert torch.equal(kv, make_kv(ids[: kv.shape[3]]))
        expected = max(
            (len(p) for n in range(len(ids) + 1) if (p := tuple(ids[:n].tolist())) in inserted), default=0
        )
        assert cache.match_length(KEY, ids) == expected
        insert(cache, ids)
        inserted.update(tuple(ids[:n].tolist()) for n in range(len(ids) + 1))
    assert cache.cached_tokens == len(inserted) - 1  # One token per distinct nonempty prefix.


def test_trim_keeps_recently_used_entries() -> None:
    cache = PrefixCache()
    for last in range(4):
        insert(cache, to_ids(1, 1, 1, last))
    cache.match(KEY, to_ids(1, 1, 1, 0))
    cache.trim(4)
    assert cache.cached_tokens == 4
    assert cache.match_length(KEY, to_ids(1, 1, 1, 0)) == 4
    assert cache.match_length(KEY, to_ids(1, 1, 1, 3)) == 3
