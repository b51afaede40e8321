"""The interface of references, which score samples with a model other than the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from instar.async_utils import map_concurrently
from instar.types import Floats, Ids, Sample


class Reference(ABC):
    async def start(self) -> None:  # noqa: B027 - most references have nothing to check
        """Check the reference before the first step. Raises ConfigError if it cannot be used."""

    @abstractmethod
    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the logprobs of each sample's tokens. The logprobs of untrained tokens may be NaN."""

    @abstractmethod
    async def close(self) -> None: ...


class PerSequenceReference(Reference):
    """A reference that scores one sequence per request, with at most ``max_in_flight`` requests at a time."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight

    @abstractmethod
    async def score(self, token_ids: Ids) -> Floats:
        """Return the logprob of every token. The first one is NaN."""

    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await map_concurrently(self._score_sample, samples, self._max_in_flight)

    async def _score_sample(self, sample: Sample) -> Floats:
        values = np.full(len(sample), np.nan, np.float32)
        trained_indexes = np.flatnonzero(sample.mask > 0)
        if len(trained_indexes):
            end = int(trained_indexes[-1]) + 1  # the tokens after the last trained token are not sent
            values[:end] = await self.score(sample.token_ids[:end])
        return values
