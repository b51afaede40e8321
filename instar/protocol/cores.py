"""Divides the machine's cores between training and sampling.

Two computations whose threads run on the same cores take far more than twice as long, because the threads
wait for each other in every operation. Therefore training and sampling each get half of the cores while both
run. A client that alternates between them always gets all cores, because the number of threads can change the
last bits of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch


class CoreSharing:
    """Divides ``count`` cores, by default torch's number of threads, between training and sampling.
    ``set_sampler_cores`` is called when the number of cores for sampling changes."""

    def __init__(self, set_sampler_cores: Callable[[int], None], count: int | None = None) -> None:
        self._count = count or torch.get_num_threads()
        self._set_sampler_cores = set_sampler_cores
        self._training = self._sampling = 0

    @contextmanager
    def reserve_for_training(self, set_cores: Callable[[int], None]) -> Generator[None]:
        """Reserve cores for a model during the block. ``set_cores`` receives the number of cores."""
        set_cores(self._share(others=self._sampling))
        self._count_training(+1)
        try:
            yield
        finally:
            self._count_training(-1)

    @contextmanager
    def reserve_for_sampling(self) -> Generator[None]:
        """Reserve cores for sampling during the block. A running training pass keeps its cores."""
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1

    def _count_training(self, change: int) -> None:
        before, self._training = self._training, self._training + change
        if not (before and self._training):
            self._set_sampler_cores(self._share(others=self._training))

    def _share(self, others: int) -> int:
        return max(1, self._count // 2) if others else self._count
