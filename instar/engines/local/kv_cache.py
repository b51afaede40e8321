"""The keys and values of the requests in progress, each in one contiguous row, and of cached prompt prefixes,
and a search for rows that share a prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from instar.types import Ids

CAPACITY_STEP = 64
"""The capacity of a row is a multiple of this many tokens."""
MIN_SHARED_TOKENS = 64
MIN_SHARED_ROWS = 4
"""The minimum average number of rows per shared prefix."""


@dataclass(frozen=True, slots=True)
class KVShape:
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def allocate_kv(shape: KVShape, rows: int, capacity: int) -> Tensor:
    """Return zeros [layers, 2, rows, kv heads, capacity, head dim]. Attention multiplies unused values by
    zero, so they must be finite. On CPUs, NumPy's zeros are fast, because they come from calloc."""
    size = (shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim)
    if shape.device != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    array = np.zeros(size, dtype={2: np.uint16, 4: np.float32}[shape.dtype.itemsize])  # NumPy lacks bfloat16
    return torch.from_numpy(array).view(shape.dtype)


class KVRows:
    def __init__(self, shape: KVShape, max_rows: int, max_tokens: int) -> None:
        self.shape = shape
        self._max_rows = max_rows
        self.max_tokens = max_tokens
        self.kv = allocate_kv(shape, 0, 0)

    @property
    def capacity_tokens(self) -> int:
        return self.kv.shape[2] * self.kv.shape[4]

    def compute_size(self, rows: int, length: int) -> tuple[int, int]:
        """Return the number and capacity of the rows to allocate for ``rows`` rows of ``length`` tokens."""
        current_rows, capacity = self.kv.shape[2], self.kv.shape[4]
        new_capacity = max(capacity, -(-length // CAPACITY_STEP) * CAPACITY_STEP)
        if rows <= current_rows:
            return current_rows, new_capacity
        doubled = min(max(8, 2 * current_rows), self._max_rows)
        can_double = rows <= doubled and doubled * new_capacity <= self.max_tokens
        return (doubled if can_double else rows), new_capacity

    def can_fit(self, rows: int, length: int) -> bool:
        """Return True if ``rows`` rows of ``length`` tokens fit in ``max_tokens``. One row always fits."""
        new_rows, capacity = self.compute_size(rows, length)
        return rows == 1 or new_rows * capacity <= self.max_tokens

    def is_oversized(self, length: int) -> bool:
        """Return True if an idle engine should free the memory before it starts a row of ``length`` tokens:
        the memory would exceed ``max_tokens``, or is over four times a full batch of this length."""
        rows, capacity = self.compute_size(1, length)
        return rows * capacity > self.max_tokens or self.capacity_tokens > 4 * self._max_rows * length

    def ensure_capacity(self, rows: int, length: int) -> None:
        old, size = self.kv, self.compute_size(rows, length)
        if size != (old.shape[2], old.shape[4]):
            self.kv = allocate_kv(self.shape, *size)
            self.kv[:, :, : old.shape[2], :, : old.shape[4]].copy_(old)

    def reset(self) -> None:
        """Free the memory. No row may be in use."""
        self.kv = allocate_kv(self.shape, 0, 0)

    def get_row(self, index: int) -> Tensor:
        """Return the keys and values of one row [layers, 2, kv heads, capacity, head dim]."""
        return self.kv[:, :, index]

    def move(self, source: int, target: int, length: int) -> None:
        self.kv[:, :, target, :, :length].copy_(self.kv[:, :, source, :, :length])

    def swap(self, a: int, length_a: int, b: int, length_b: int) -> None:
        copy_a = self.kv[:, :, a, :, :length_a].clone()
        self.move(b, a, length_b)
        self.kv[:, :, b, :, :length_a].copy_(copy_a)


@dataclass(eq=False, slots=True)
class PrefixNode:
    ids: Ids
    kv: Tensor | None
    """[layers, 2, kv heads, len(ids), head dim]; None at the root."""
    parent: PrefixNode | None
    children: dict[int, PrefixNode] = field(default_factory=dict[int, "PrefixNode"])
    last_used: int = 0


def common_prefix_length(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


class PrefixCache:
    """A radix tree over token ids for each policy, with one LRU eviction for all of them. ``weights_key``
    identifies the policy, because keys and values depend on the weights."""

    def __init__(self) -> None:
        self._roots: dict[int, PrefixNode] = {}
        self._clock = 0
        self.cached_tokens = 0

    def match(self, weights_key: int, ids: Ids) -> list[tuple[Tensor, int]]:
        """Return the keys and values of the longest cached prefix of ``ids``, in pieces. Each piece comes
        with the number of its leading tokens that match."""
        self._clock += 1
        pieces: list[tuple[Tensor, int]] = []
        for node, count in self._walk(weights_key, ids):
            node.last_used = self._clock
            assert node.kv is not None
            pieces.append((node.kv, count))
        return pieces

    def match_length(self, weights_key: int, ids: Ids) -> int:
        return sum(count for _, count in self._walk(weights_key, ids))

    def insert(self, weights_key: int, ids: Ids, row: Tensor) -> None:
        """Cache the keys and values of ``ids``. ``row`` has the shape [layers, 2, kv heads, ≥ len(ids), head
        dim]; only entries that are not cached yet are copied from it."""
        self._clock += 1
        root = self._roots.setdefault(weights_key, PrefixNode(np.empty(0, np.int32), None, None))
        parent, matched = root, 0
        for node, count in self._walk(weights_key, ids):
            parent, matched = node, matched + count
            if count < len(node.ids):
                parent = self._split(node, count)
            parent.last_used = self._clock
        if matched == len(ids):
            return
        kv = row[:, :, :, matched : len(ids)].clone()
        node = PrefixNode(ids[matched:].copy(), kv, parent, last_used=self._clock)
        parent.children[int(ids[matched])] = node
        self.cached_tokens += len(ids) - matched

    def trim(self, max_tokens: int) -> None:
        """Evict the least recently used prefixes until at most ``max_tokens`` are cached."""
        while self.cached_tokens > max_tokens:
            leaf = min(self._leaves(), key=lambda node: node.last_used)
            assert leaf.parent is not None
            del leaf.parent.children[int(leaf.ids[0])]
            self.cached_tokens -= len(leaf.ids)

    def drop(self, weights_key: int) -> None:
        """Remove the prefixes of one policy."""
        self._roots.pop(weights_key, None)
        self.cached_tokens = sum(len(node.ids) for node in self._nodes())

    def clear(self) -> None:
        self._roots.clear()
        self.cached_tokens = 0

    def _walk(self, weights_key: int, ids: Ids) -> Iterator[tuple[PrefixNode, int]]:
        """Yield the nodes along ``ids`` and the number of matching tokens in each."""
        node, matched = self._roots.get(weights_key), 0
        while node and matched < len(ids) and (child := node.children.get(int(ids[matched]))):
            count = common_prefix_length(child.ids, ids[matched:])
            is_full_match = count == len(child.ids)  # before the yield, because the caller may split the node
            yield child, count
            if not is_full_match:
                return
            node, matched = child, matched + count

    def _split(self, node: PrefixNode, count: int) -> PrefixNode:
        """Split a node after ``count`` tokens and return the node with these tokens."""
        assert node.parent is not None
        assert node.kv is not None
        upper = PrefixNode(
            node.ids[:count].copy(), node.kv[:, :, :, :count].clone(), node.parent, last_used=node.last_used
        )
        node.parent.children[int(node.ids[0])] = upper
        node.ids, node.kv, node.parent = node.ids[count:].copy(), node.kv[:, :, :, count:].clone(), upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _leaves(self) -> Iterator[PrefixNode]:
        return (node for node in self._nodes() if not node.children)

    def _nodes(self) -> Iterator[PrefixNode]:
        """Yield all nodes except the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def find_shared_prefixes(
    prompts: Sequence[Ids], weights_keys: Sequence[int]
) -> tuple[int, list[list[int]]] | None:
    """Return the common length of the shared prefixes and the rows of each, or None if sharing does not pay
    off. ``weights_keys`` identify the weights with which each row's prefix was computed."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    for row, (prompt, key) in enumerate(zip(prompts, weights_keys, strict=True)):
        groups.setdefault((key, prompt[:MIN_SHARED_TOKENS].tobytes()), []).append(row)
    if len(prompts) < MIN_SHARED_ROWS * len(groups):
        return None
    length = min(
        min(common_prefix_length(prompts[rows[0]], prompts[row]) for row in rows) for rows in groups.values()
    )
    # Each row must have a key that is not shared, because an attention block must not be empty.
    length = min(length, min(len(prompt) for prompt in prompts) - 1)
    return (length, list(groups.values())) if length >= MIN_SHARED_TOKENS else None
