"""The keys and values of the requests in progress. Each request has one contiguous row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CAPACITY_STEP = 64
"""The capacity of a row is a multiple of this many tokens."""


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
