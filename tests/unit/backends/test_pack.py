from __future__ import annotations

import numpy as np
import pytest
import torch

from instar.backends.local.attention import (
    BIAS_ALIGNMENT,
    MAX_INLINE_ANCESTOR_TOKENS,
    make_attention_plan,
    make_tree_bias,
)
from instar.backends.local.pack import NO_TOKEN, PackedRow, pack, split_micro_batches


def make_ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def make_random_sequences(seed: int) -> list[np.ndarray]:
    """Return sequences over a small alphabet, so that they share prefixes of every length."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32) for _ in range(40)]
    return [*sequences, sequences[0], sequences[3]]


def make_visibility(packed: PackedRow) -> np.ndarray:
    """Return the attention mask [T, T], derived from the nodes."""
    visible = np.zeros((len(packed), len(packed)), bool)
    for node in packed.nodes:
        for row in range(node.start, node.end):
            visible[row, node.start : row + 1] = True
        visible[node.end : node.subtree_end, node.start : node.end] = True
    return visible


def test_pack_matches_docstring_example() -> None:
    packed = pack([make_ids(1, 2, 3, 4), make_ids(1, 2, 3, 5, 6), make_ids(1, 2, 3, 5, 7)])
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packed.positions.tolist() == [0, 1, 2, 3, 3, 4, 4]
    assert packed.previous.tolist() == [NO_TOKEN, 0, 1, 2, 2, 4, 4]
    assert [(n.parent, n.start, n.end, n.subtree_end) for n in packed.nodes] == [
        (None, 0, 3, 7),
        (0, 3, 4, 4),
        (0, 4, 5, 7),
        (2, 5, 6, 6),
        (2, 6, 7, 7),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_packed_tokens_attend_to_exactly_their_prefix(seed: int) -> None:
    sequences = make_random_sequences(seed)
    packed = pack(sequences)
    visible = make_visibility(packed)
    assert len(packed) == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})
    for sequence, path in zip(sequences, packed.paths, strict=True):
        assert packed.token_ids[path].tolist() == sequence.tolist()
        assert packed.positions[path].tolist() == list(range(len(sequence)))
        assert packed.previous[path].tolist() == [NO_TOKEN, *path[:-1].tolist()]
        for position, row in enumerate(path):
            assert np.flatnonzero(visible[row]).tolist() == sorted(path[: position + 1].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_attention_plan_covers_each_pair_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, 9, n).astype(np.int32) for n in (3, MAX_INLINE_ANCESTOR_TOKENS, 40)]
    sequences = [np.concatenate([prefix, s]) for prefix in prefixes for s in make_random_sequences(seed)[:12]]
    packed = pack(sequences)
    plan = make_attention_plan(packed, "cpu", torch.float32)
    visits = np.zeros((len(packed), len(packed)), int)
    for block in plan.own:
        length = block.rows.shape[1]
        for query, target in zip(block.queries.tolist(), block.targets.tolist(), strict=True):
            row = block.rows[query // length].numpy()
            assert row[query % length] == target
            visits[target, row[: query % length + 1]] += 1
    for block in plan.cross:
        visits[block.queries, block.keys] += 1
    assert (visits == make_visibility(packed)).all()
    bias = make_tree_bias(packed, "cpu", torch.float32)
    assert ((bias == 0).numpy() == make_visibility(packed)).all()
    assert bias.stride(0) % BIAS_ALIGNMENT == 0


def test_split_micro_batches_keeps_all_sequences_and_stays_within_the_budget() -> None:
    sequences = make_random_sequences(1)
    batches = split_micro_batches(sequences, 25)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    assert len(batches) > 1
    for batch in batches:
        assert len(pack([sequences[i] for i in batch])) <= 25


def test_split_micro_batches_isolates_sequence_over_budget() -> None:
    long, short = np.arange(50, dtype=np.int32), make_ids(99, 98)
    assert split_micro_batches([long, short, long[:3]], 10) == [[2], [0], [1]]


def test_pack_of_empty_input_is_empty() -> None:
    assert len(pack([])) == 0
    assert split_micro_batches([], 10) == []
    assert len(pack([make_ids(), make_ids(4)])) == 1
