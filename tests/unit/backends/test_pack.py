from __future__ import annotations

import numpy as np
import pytest

from instar.backends.local.attention import INLINE_TOKENS, make_attention_plan
from instar.backends.local.pack import NO_TOKEN, PackedRow, pack, split_micro_batches


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def random_family(seed: int) -> list[np.ndarray]:
    """Sequences over a small alphabet, so that they share prefixes of every length."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32) for _ in range(40)]
    return [*found, found[0], found[3]]


def sees(packed: PackedRow) -> np.ndarray:
    """[T, T] which token attends to which, read off the nodes."""
    visible = np.zeros((len(packed), len(packed)), bool)
    for node in packed.nodes:
        for row in range(node.start, node.end):
            visible[row, node.start : row + 1] = True
        visible[node.end : node.subtree_end, node.start : node.end] = True
    return visible


def test_the_example_of_the_docstring() -> None:
    packed = pack([ids(1, 2, 3, 4), ids(1, 2, 3, 5, 6), ids(1, 2, 3, 5, 7)])
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
def test_every_token_sees_exactly_what_stands_before_it(seed: int) -> None:
    sequences = random_family(seed)
    packed = pack(sequences)
    visible = sees(packed)
    assert len(packed) == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})
    for sequence, path in zip(sequences, packed.paths, strict=True):
        assert packed.token_ids[path].tolist() == sequence.tolist()
        assert packed.positions[path].tolist() == list(range(len(sequence)))
        assert packed.previous[path].tolist() == [NO_TOKEN, *path[:-1].tolist()]
        for place, row in enumerate(path):
            assert np.flatnonzero(visible[row]).tolist() == sorted(path[: place + 1].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_covers_each_pair_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 9, n).astype(np.int32) for n in (3, INLINE_TOKENS, 40)]
    sequences = [np.concatenate([stem, s]) for stem in stems for s in random_family(seed)[:12]]
    packed = pack(sequences)
    plan = make_attention_plan(packed, "cpu")
    seen = np.zeros((len(packed), len(packed)), int)
    for block in plan.own:
        length = block.rows.shape[1]
        for query, target in zip(block.queries.tolist(), block.targets.tolist(), strict=True):
            row = block.rows[query // length].numpy()
            assert row[query % length] == target
            seen[target, row[: query % length + 1]] += 1
    for block in plan.cross:
        seen[block.queries, block.keys] += 1
    assert (seen == sees(packed)).all()


def test_split_keeps_the_budget_of_distinct_tokens_and_loses_nothing() -> None:
    sequences = random_family(1)
    batches = split_micro_batches(sequences, 25)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    assert len(batches) > 1
    for batch in batches:
        assert len(pack([sequences[i] for i in batch])) <= 25


def test_a_sequence_over_the_budget_goes_alone() -> None:
    long, short = np.arange(50, dtype=np.int32), ids(99, 98)
    assert split_micro_batches([long, short, long[:3]], 10) == [[2], [0], [1]]


def test_nothing_packs_to_nothing() -> None:
    assert len(pack([])) == 0
    assert split_micro_batches([], 10) == []
    assert len(pack([ids(), ids(4)])) == 1
