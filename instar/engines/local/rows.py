"""Keys and values of the replies in progress: one contiguous row each, all layers in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

STEP = 64
"""Capacities are multiples of this."""


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
    """Return zeros [layers, 2, rows, kv heads, capacity, head dim]. Values beyond a row's length are masked,
    but still multiplied by zero, so they must be finite. On the CPU the memory comes from calloc, which does
    not touch zero pages."""
    size = (shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim)
    if shape.device != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    raw = np.zeros(size, dtype={2: np.uint16, 4: np.float32}[shape.dtype.itemsize])
    return torch.from_numpy(raw).view(shape.dtype)


class KVRows:
    """The keys and values of all rows, in memory that grows as needed. The rows in use are ``0 .. used-1``;
    the last one is moved to close a gap."""

    def __init__(self, shape: KVShape, max_rows: int, max_tokens: int) -> None:
        self.shape = shape
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self.kv = allocate_kv(shape, 0, 0)

    @property
    def tokens(self) -> int:
        """Return the capacity of the allocated rows in tokens."""
        return self.kv.shape[2] * self.kv.shape[4]

    def grown_size(self, rows: int, length: int) -> tuple[int, int]:
        """Return the size to allocate for ``rows`` rows of ``length`` tokens."""
        have_rows, have_length = self.kv.shape[2], self.kv.shape[4]
        new_length = max(have_length, -(-length // STEP) * STEP)
        if rows <= have_rows:
            return have_rows, new_length
        ample = min(max(8, 2 * have_rows), self._max_rows)
        return (ample if rows <= ample and ample * new_length <= self._max_tokens else rows), new_length

    def can_fit(self, rows: int, length: int) -> bool:
        """Return True if this many rows of this length fit after growing. One row always fits."""
        new_rows, new_length = self.grown_size(rows, length)
        return rows == 1 or new_rows * new_length <= self._max_tokens

    def is_oversized(self, length: int) -> bool:
        """Return True if the allocated memory is too large to keep for a first row of ``length`` tokens."""
        rows, capacity = self.grown_size(1, length)
        return rows * capacity > self._max_tokens or self.tokens > 4 * self._max_rows * length

    def set_max_tokens(self, max_tokens: int) -> None:
        """Change the limit. Memory that is already allocated is kept until it holds no rows."""
        self._max_tokens = max_tokens

    def ensure(self, rows: int, length: int) -> None:
        have_rows, have_length = self.kv.shape[2], self.kv.shape[4]
        new_rows, new_length = self.grown_size(rows, length)
        if (new_rows, new_length) == (have_rows, have_length):
            return
        old, self.kv = self.kv, allocate_kv(self.shape, new_rows, new_length)
        self.kv[:, :, :have_rows, :, :have_length].copy_(old)

    def reset(self) -> None:
        """Free all memory. No row may be in use."""
        self.kv = allocate_kv(self.shape, 0, 0)

    def row(self, index: int) -> Tensor:
        """Return the keys and values of one row [layers, 2, kv heads, capacity, head dim]."""
        return self.kv[:, :, index]

    def move(self, source: int, target: int, length: int) -> None:
        self.kv[:, :, target, :, :length].copy_(self.kv[:, :, source, :, :length])

    def swap(self, a: int, length_a: int, b: int, length_b: int) -> None:
        kept = self.kv[:, :, a, :, :length_a].clone()
        self.move(b, a, length_b)
        self.kv[:, :, b, :, :length_a].copy_(kept)
