"""A teacher that an engine runs."""

from __future__ import annotations

import asyncio
import time

from instar.engines.base import Engine
from instar.errors import EngineUnavailable
from instar.reference.base import PerSequenceReference
from instar.types import Floats, Ids

MAX_IN_FLIGHT = 16
UNAVAILABLE_TIMEOUT = 300.0
"""Seconds to wait for an engine that cannot be reached: it is started again, and loads its model."""


class EngineReference(PerSequenceReference):
    def __init__(
        self, engine: Engine, *, max_in_flight: int = MAX_IN_FLIGHT, timeout: float = UNAVAILABLE_TIMEOUT
    ) -> None:
        super().__init__(max_in_flight)
        self._engine = engine
        self._timeout = timeout

    async def score(self, token_ids: Ids) -> Floats:
        deadline = time.monotonic() + self._timeout
        pause = 0.1
        while True:
            try:
                return await self._engine.logprobs(token_ids)
            except EngineUnavailable:
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def close(self) -> None:
        await self._engine.close()
