"""Pack samples into one row that contains every shared prefix only once.

The samples of a micro-batch form a trie of token segments. Its nodes are laid out in depth-first order, so
that the descendants of a node are contiguous in the row::

    samples   1 2 3 4    1 2 3 5 6    1 2 3 5 7        tokens     1 2 3  4  5  6  7
                                                       positions  0 1 2  3  3  4  4
    nodes     [1 2 3] ── [4]                           previous  -1 0 1  2  2  4  4
                     └── [5] ── [6]
                            └── [7]

A token attends to the ancestors of its node, to the tokens before it in its own node, and to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from instar.types import Ids

IntArray = NDArray[np.int64]

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class PackNode:
    """A node of the trie. It covers the row from ``start`` to ``end``, and its descendants cover the row from
    ``end`` to ``subtree_end``. ``parent`` is the index of the parent node, or None for a root."""

    parent: int | None
    start: int
    end: int
    subtree_end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PackedRow:
    token_ids: IntArray
    positions: IntArray
    """The position of each token in its sample."""
    previous: IntArray
    """The row position of the token before each token; ``NO_TOKEN`` for the first token of a sample."""
    nodes: tuple[PackNode, ...]
    """The nodes, with parents before their children."""
    paths: tuple[IntArray, ...]
    """The row positions of each sample's tokens, one array per sample."""

    def __len__(self) -> int:
        return len(self.token_ids)


def split_micro_batches(sequences: Sequence[Ids], max_tokens: int) -> list[list[int]]:
    """Split the sequences into micro-batches of at most ``max_tokens`` tokens, as lists of indices. A shared
    prefix counts once per micro-batch. Sequences are taken in lexicographic order, so that those with a
    common prefix are adjacent. A sequence longer than ``max_tokens`` gets its own micro-batch."""
    batches: list[list[int]] = []
    used_tokens = 0
    previous: int | None = None
    for index in _lexicographic_order(sequences):
        length = added_tokens = len(sequences[index])
        if previous is not None:
            added_tokens -= _common_prefix_length(sequences[previous], sequences[index])
        if batches and used_tokens + added_tokens <= max_tokens:
            batches[-1].append(index)
            used_tokens += added_tokens
        else:
            batches.append([index])
            used_tokens = length
        previous = index
    return batches


def pack(sequences: Sequence[Ids]) -> PackedRow:
    """Pack the sequences, which may be in any order, into one row. Equal sequences share all their tokens."""
    order = _lexicographic_order(sequences)
    ordered = [sequences[index] for index in order]
    shared_lengths = [0, *(_common_prefix_length(a, b) for a, b in pairwise(ordered))]
    tokens: list[Ids] = []
    positions: list[IntArray] = []
    ordered_paths: list[IntArray] = []
    previous: list[IntArray] = []
    total = 0
    for i, sequence in enumerate(ordered):
        shared = shared_lengths[i]
        row_positions = np.arange(total, total + len(sequence) - shared, dtype=np.int64)
        path = np.concatenate([ordered_paths[-1][:shared], row_positions]) if shared else row_positions
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence), dtype=np.int64))
        predecessors = np.concatenate([np.array([NO_TOKEN], dtype=np.int64), path[:-1]])
        previous.append(predecessors[shared : len(sequence)])
        ordered_paths.append(path)
        total += len(row_positions)
    paths = [ordered_paths[0]] * len(sequences) if ordered_paths else []
    for path, index in zip(ordered_paths, order, strict=True):
        paths[index] = path
    return PackedRow(
        token_ids=np.concatenate([*tokens, np.empty(0, np.int32)]).astype(np.int64),
        positions=np.concatenate([*positions, np.empty(0, np.int64)]),
        previous=np.concatenate([*previous, np.empty(0, np.int64)]),
        nodes=_make_nodes([len(sequence) for sequence in ordered], shared_lengths),
        paths=tuple(paths),
    )


def _make_nodes(lengths: list[int], shared_lengths: list[int]) -> tuple[PackNode, ...]:
    """Return the trie's nodes for sorted sequences of these ``lengths``. Sequences i - 1 and i share their
    first ``shared_lengths[i]`` tokens."""
    parents: list[int | None] = []
    bounds: list[tuple[int, int]] = []
    total = 0
    stack: list[tuple[int, int, int, int | None]] = [(0, len(lengths), 0, None)] if lengths else []
    while stack:
        first, end, depth, parent = stack.pop()
        end_depth = min([lengths[first], *shared_lengths[first + 1 : end]])
        if end_depth > depth:
            parents.append(parent)
            bounds.append((total, total + end_depth - depth))
            total += end_depth - depth
            parent = len(parents) - 1
        branches = [first, *(i for i in range(first + 1, end) if shared_lengths[i] == end_depth), end]
        children = [(a, b, end_depth, parent) for a, b in pairwise(branches) if lengths[b - 1] > end_depth]
        stack.extend(reversed(children))
    subtree_ends = [end for _, end in bounds]
    for node in range(len(parents) - 1, -1, -1):
        if (parent := parents[node]) is not None:
            subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[node])
    return tuple(PackNode(parents[i], *bounds[i], subtree_ends[i]) for i in range(len(parents)))


def _lexicographic_order(sequences: Sequence[Ids]) -> list[int]:
    # Big-endian bytes compare like the ids, but much faster than tuples of ints.
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=lambda index: (keys[index], index))


def _common_prefix_length(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different_indices = np.flatnonzero(a[:length] != b[:length])
    return int(different_indices[0]) if len(different_indices) else length
