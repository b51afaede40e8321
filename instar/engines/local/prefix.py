"""A cache of keys and values: a radix tree over token ids, exact to the token, with LRU eviction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from instar.types import Ids


@dataclass(eq=False, slots=True)
class PrefixNode:
    ids: Ids
    kv: Tensor | None
    """[layers, 2, kv heads, len(ids), head dim]; None at the root."""
    parent: PrefixNode | None
    children: dict[int, PrefixNode] = field(default_factory=dict[int, "PrefixNode"])
    used: int = 0


def common_length(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of ``a`` and ``b``."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


class PrefixCache:
    def __init__(self) -> None:
        self._root = PrefixNode(np.empty(0, np.int32), None, None)
        self._clock = 0
        self.tokens = 0

    def match(self, ids: Ids) -> list[tuple[Tensor, int]]:
        """Return the keys and values of the longest cached prefix of ``ids``, in pieces, each with the number
        of its tokens to use."""
        self._clock += 1
        pieces: list[tuple[Tensor, int]] = []
        for node, count in self._walk(ids):
            node.used = self._clock
            assert node.kv is not None
            pieces.append((node.kv, count))
        return pieces

    def match_length(self, ids: Ids) -> int:
        return sum(count for _, count in self._walk(ids))

    def insert(self, ids: Ids, row: Tensor) -> None:
        """Cache the keys and values of ``ids``. Those that are not cached yet are copied from a row [layers,
        2, kv heads, ≥ len(ids), head dim]."""
        self._clock += 1
        parent, done = self._root, 0
        for node, count in self._walk(ids):
            parent, done = node, done + count
            if count < len(node.ids):
                parent = self._split(node, count)
            parent.used = self._clock
        if done == len(ids):
            return
        kept = row[:, :, :, done : len(ids)].clone()
        parent.children[int(ids[done])] = PrefixNode(ids[done:].copy(), kept, parent, used=self._clock)
        self.tokens += len(ids) - done

    def trim(self, tokens: int) -> None:
        """Evict the least recently used entries until at most ``tokens`` are cached."""
        while self.tokens > tokens:
            leaf = min(self._leaves(), key=lambda node: node.used)
            assert leaf.parent is not None
            del leaf.parent.children[int(leaf.ids[0])]
            self.tokens -= len(leaf.ids)

    def clear(self) -> None:
        self._root.children.clear()
        self.tokens = 0

    def _walk(self, ids: Ids) -> Iterator[tuple[PrefixNode, int]]:
        """Yield the nodes along ``ids`` with the number of matching tokens; only the last may match
        partially."""
        node, done = self._root, 0
        while done < len(ids) and (child := node.children.get(int(ids[done]))):
            count = common_length(child.ids, ids[done:])
            is_full_match = count == len(child.ids)  # before the yield: the caller may split the node
            yield child, count
            if not is_full_match:
                return
            node, done = child, done + count

    def _split(self, node: PrefixNode, count: int) -> PrefixNode:
        """Split a node after ``count`` tokens and return the upper part."""
        assert node.parent is not None
        assert node.kv is not None
        upper = PrefixNode(
            node.ids[:count].copy(), node.kv[:, :, :, :count].clone(), node.parent, used=node.used
        )
        node.parent.children[int(node.ids[0])] = upper
        node.ids, node.kv, node.parent = node.ids[count:].copy(), node.kv[:, :, :, count:].clone(), upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _leaves(self) -> Iterator[PrefixNode]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                yield node
