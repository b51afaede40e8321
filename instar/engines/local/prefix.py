"""Keys and values kept for reuse: a radix tree over token ids, exact to the token, least recently
used out first."""

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
    """How many ids the two begin with in common."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


class PrefixCache:
    def __init__(self) -> None:
        self._root = PrefixNode(np.empty(0, np.int32), None, None)
        self._clock = 0
        self.tokens = 0

    def match(self, ids: Ids) -> list[tuple[Tensor, int]]:
        """The longest cached prefix of ``ids``: pieces of keys and values, each with how many of its
        tokens count."""
        self._clock += 1
        pieces: list[tuple[Tensor, int]] = []
        for node, count in self._walk(ids):
            node.used = self._clock
            assert node.kv is not None
            pieces.append((node.kv, count))
        return pieces

    def match_length(self, ids: Ids) -> int:
        """How long the cached prefix of ``ids`` is."""
        return sum(count for _, count in self._walk(ids))

    def insert(self, ids: Ids, row: Tensor) -> None:
        """Keep the keys and values of ``ids``, copied out of a row [layers, 2, kv heads, ≥ len(ids), head
        dim] so far as they are not here yet."""
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
        """Forget what was used least recently until at most ``tokens`` are held."""
        while self.tokens > tokens:
            leaf = min(self._leaves(), key=lambda node: node.used)
            assert leaf.parent is not None
            del leaf.parent.children[int(leaf.ids[0])]
            self.tokens -= len(leaf.ids)

    def clear(self) -> None:
        self._root.children.clear()
        self.tokens = 0

    def _walk(self, ids: Ids) -> Iterator[tuple[PrefixNode, int]]:
        """Nodes along ``ids`` with how many tokens of each agree; only the last may agree in part."""
        node, done = self._root, 0
        while done < len(ids) and (child := node.children.get(int(ids[done]))):
            count = common_length(child.ids, ids[done:])
            whole = count == len(child.ids)  # asked before: the caller may part the node
            yield child, count
            if not whole:
                return
            node, done = child, done + count

    def _split(self, node: PrefixNode, count: int) -> PrefixNode:
        """Part a node in two; returns the upper one."""
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
