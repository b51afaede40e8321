"""A teacher that runs in an engine."""

from __future__ import annotations

from instar.engines.base import Engine
from instar.errors import EngineUnavailable
from instar.http.retry import RetryPolicy
from instar.reference.base import PerSequenceReference
from instar.types import Floats, Ids

MAX_IN_FLIGHT = 16
UNAVAILABLE_TIMEOUT = 300.0
"""Seconds to wait for an unreachable engine. It may be restarting and loading its model."""
RETRY_POLICY = RetryPolicy(first_delay=0.1, max_delay=5.0, jitter=(1.0, 1.0))


class EngineReference(PerSequenceReference):
    def __init__(
        self, engine: Engine, *, max_in_flight: int = MAX_IN_FLIGHT, timeout: float = UNAVAILABLE_TIMEOUT
    ) -> None:
        super().__init__(max_in_flight)
        self._engine = engine
        self._timeout = timeout

    async def score(self, token_ids: Ids) -> Floats:
        return await RETRY_POLICY.run(
            lambda: self._engine.logprobs(token_ids), retry_on=EngineUnavailable, seconds=self._timeout
        )

    async def close(self) -> None:
        await self._engine.close()
