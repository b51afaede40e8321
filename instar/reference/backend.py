"""The base model as the reference: the backend that trains tells its logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from instar.backends.base import Backend
from instar.errors import ConfigError
from instar.reference.base import Reference
from instar.types import Floats, Sample


class BackendReference(Reference):
    def __init__(self, backend: Backend) -> None:
        if not backend.capabilities.reference:
            raise ConfigError(
                "trainer.reference.type: given 'base'; this backend does not tell the base model's logprobs. "
                "Use 'completions' or 'engine', or set trainer.reference.weight to 0"
            )
        self._backend = backend

    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._backend.reference_logprobs(samples)

    async def close(self) -> None:
        """Nothing: the backend is the trainer's."""
