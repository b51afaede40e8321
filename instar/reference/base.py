"""What a reference is: it tells the logprobs that a model other than the policy gives to samples' tokens."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from instar.types import Floats, Ids, Sample


class Reference(ABC):
    async def start(self) -> None:  # noqa: B027 - most have nothing to look at
        """Raise ConfigError where it can be known before the first batch that it will not do."""

    @abstractmethod
    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Per sample, the logprob of every trained token given those before; of others, or NaN."""

    @abstractmethod
    async def close(self) -> None: ...


class PerSequenceReference(Reference):
    """A reference elsewhere, that is asked about one sequence at a time, several times at once."""

    def __init__(self, max_in_flight: int) -> None:
        self._at_once = max_in_flight

    @abstractmethod
    async def score(self, token_ids: Ids) -> Floats:
        """The logprob of every token given those before; NaN at index 0."""

    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """The first that fails ends the others."""
        gate = asyncio.Semaphore(self._at_once)

        async def told(sample: Sample) -> Floats:
            async with gate:
                return await self._score(sample)

        tasks = [asyncio.ensure_future(told(sample)) for sample in samples]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(self, sample: Sample) -> Floats:
        """Up to the last trained token: what follows is not asked for."""
        values = np.full(len(sample), np.nan, np.float32)
        trained = np.flatnonzero(sample.mask > 0)
        if len(trained):
            end = int(trained[-1]) + 1
            values[:end] = await self.score(sample.token_ids[:end])
        return values
