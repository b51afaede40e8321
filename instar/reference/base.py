"""The interface of references: models other than the policy that score the tokens of samples."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from instar.types import Floats, Ids, Sample


class Reference(ABC):
    async def start(self) -> None:  # noqa: B027 - most have nothing to check
        """Check what can be checked before the first batch. Raises ConfigError if the reference cannot be
        used."""

    @abstractmethod
    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the logprob of every trained token of each sample, given the preceding tokens. Other tokens
        may be NaN."""

    @abstractmethod
    async def close(self) -> None: ...


class PerSequenceReference(Reference):
    """A remote reference that scores one sequence per request, with several requests in flight."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight

    @abstractmethod
    async def score(self, token_ids: Ids) -> Floats:
        """Return the logprob of every token given the preceding tokens (NaN at index 0)."""

    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of logprobs per sample. The first request that fails cancels the others."""
        slots = asyncio.Semaphore(self._max_in_flight)

        async def score(sample: Sample) -> Floats:
            async with slots:
                return await self._score_sample(sample)

        tasks = [asyncio.ensure_future(score(sample)) for sample in samples]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score_sample(self, sample: Sample) -> Floats:
        """Return the logprobs of the sample. Only the tokens up to the last trained one are sent."""
        values = np.full(len(sample), np.nan, np.float32)
        trained = np.flatnonzero(sample.mask > 0)
        if len(trained):
            end = int(trained[-1]) + 1
            values[:end] = await self.score(sample.token_ids[:end])
        return values
