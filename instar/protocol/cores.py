"""How models in training and samplers share the cores of the machine.

Threads of two computations on the same cores slow each other down by far more than half: they wait for one
another in every operation. So while both go on, each is given half of the cores. Where a client samples and
trains in turn, each has all of them, always: how many they are can change the last bits of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch


class CoreSharing:
    def __init__(self, samplers: Callable[[int], None], count: int | None = None) -> None:
        """``samplers`` is told how many are the samplers', whenever that changes. ``count`` there are; by
        default as many as torch has threads now."""
        self._count = count or torch.get_num_threads()
        self._samplers = samplers
        self._training = self._sampling = 0

    @contextmanager
    def training(self, use_cores: Callable[[int], None]) -> Generator[None]:
        """While a model computes what it was asked for; ``use_cores`` is that model's."""
        use_cores(self._share(beside=self._sampling))
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    @contextmanager
    def sampling(self) -> Generator[None]:
        """While something is sampled or scored. A model that computes already goes on as it began."""
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1

    def _change(self, by: int) -> None:
        before, self._training = self._training, self._training + by
        if not (before and self._training):
            self._samplers(self._share(beside=self._training))

    def _share(self, beside: int) -> int:
        return max(1, self._count // 2) if beside else self._count
