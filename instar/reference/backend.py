"""A reference that is the base model. The training backend computes its logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from instar.backends.base import Backend
from instar.reference.base import Reference
from instar.types import Floats, Sample


class BackendReference(Reference):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._backend.reference_logprobs(samples)

    async def close(self) -> None:
        """Do nothing: the trainer closes the backend."""
