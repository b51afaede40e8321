"""The prefix cache against what it stands for: the keys and values of a token tell all tokens before it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from instar.engines.local.prefix import PrefixCache
from instar.types import Ids

LONGEST = 12


def as_ids(*ids: int) -> Ids:
    return np.asarray(ids, np.int32)


def keys_and_values(ids: Ids) -> Tensor:
    """[1, 1, 1, tokens, 1]: for each token the whole sequence up to it, as one number."""
    told, so_far = list[int](), 1
    for token in ids.tolist():
        so_far = so_far * 4 + token
        told.append(so_far)
    return torch.tensor(told, dtype=torch.float64).view(1, 1, 1, -1, 1)


def found(cache: PrefixCache, ids: Ids) -> Tensor:
    pieces = [kv[:, :, :, :count] for kv, count in cache.match(ids)]
    return torch.cat([keys_and_values(ids[:0]), *pieces], 3)


def insert(cache: PrefixCache, ids: Ids) -> None:
    # A row has room behind what it holds, with whatever was there before.
    room = torch.full((1, 1, 1, LONGEST, 1), -1.0, dtype=torch.float64)
    cache.insert(ids, torch.cat([keys_and_values(ids), room], 3))


def test_prefix_cache_splits_a_node_that_has_a_child() -> None:
    """After 1 2, one sequence goes on with 3 and then 0, the other with 0 at once."""
    cache = PrefixCache()
    insert(cache, as_ids(1, 2, 3))
    insert(cache, as_ids(1, 2, 3, 0, 1))
    insert(cache, as_ids(1, 2, 0, 3))
    for ids in (as_ids(1, 2, 3, 0, 3), as_ids(1, 2, 0, 3)):
        got = found(cache, ids)
        assert torch.equal(got, keys_and_values(ids[: got.shape[3]]))
    assert cache.match_length(as_ids(1, 2, 0, 3)) == 4


@pytest.mark.parametrize("seed", range(20))
def test_prefix_cache_returns_values_of_the_same_prefix(seed: int) -> None:
    rng = Random(seed)
    cache = PrefixCache()
    inserted: set[tuple[int, ...]] = set()
    for _ in range(200):
        ids = as_ids(*(rng.randrange(2 + seed % 2) for _ in range(rng.randrange(1, LONGEST))))
        got = found(cache, ids)
        assert torch.equal(got, keys_and_values(ids[: got.shape[3]]))
        known = max(
            (len(p) for n in range(len(ids) + 1) if (p := tuple(ids[:n].tolist())) in inserted), default=0
        )
        assert cache.match_length(ids) == known
        insert(cache, ids)
        inserted.update(tuple(ids[:n].tolist()) for n in range(len(ids) + 1))
    assert cache.tokens == len(inserted) - 1  # of each distinct one, but for none at all


def test_trim_keeps_recently_used_entries() -> None:
    cache = PrefixCache()
    for last in range(4):
        insert(cache, as_ids(1, 1, 1, last))
    cache.match(as_ids(1, 1, 1, 0))
    cache.trim(4)
    assert cache.tokens == 4
    assert cache.match_length(as_ids(1, 1, 1, 0)) == 4
    assert cache.match_length(as_ids(1, 1, 1, 3)) == 3
