"""A teacher that an engine runs."""

from __future__ import annotations

import asyncio
import time

from instar.engines.base import Engine
from instar.errors import EngineUnavailable
from instar.reference.base import OneByOne
from instar.types import Floats, Ids

AT_ONCE = 16
PATIENCE = 300.0
"""Seconds to wait for an engine that cannot be reached: it is started again, and loads its model."""


class EngineReference(OneByOne):
    def __init__(self, engine: Engine, *, at_once: int = AT_ONCE, patience: float = PATIENCE) -> None:
        super().__init__(at_once)
        self._engine = engine
        self._patience = patience

    async def score(self, token_ids: Ids) -> Floats:
        deadline = time.monotonic() + self._patience
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
