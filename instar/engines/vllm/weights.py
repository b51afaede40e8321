"""Which version of the policy a vLLM server serves, and the pause in which its weights change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from instar.engines.vllm.client import VllmClient
from instar.errors import EngineUnavailable

PAUSE_SECONDS = 120.0
"""How long a step under way may take to end."""


class Change:
    """Weights that are being replaced."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def begins(self) -> None:
        """From here on what was served is gone: if ``serves`` is not called, nothing is served."""
        self._weights.lost = "its weights were being replaced"

    def serves(self, version: int) -> None:
        """The weights in place are whole, and of this version."""
        self._weights.lost = None
        self._weights.version = version


class Weights:
    """Of one server. ``settle`` waits until what the server had sampled before a pause has been read."""

    def __init__(self, client: VllmClient, settle: Callable[[], Awaitable[None]]) -> None:
        self.client = client
        self.version = 0
        """Of what is sampled from now on."""
        self.lost: str | None = None
        """Why nothing can be sampled, where the weights in place are of no version."""
        self._settle = settle
        self._changing = asyncio.Lock()

    def check(self) -> None:
        if self.lost is not None:
            raise EngineUnavailable(f"the vLLM server serves nothing until a policy is loaded: {self.lost}")

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[Change]:
        """Within, nothing is sampled, everything sampled before is stamped with the version before, and
        nothing that was computed under the old weights is kept: requests in flight compute their keys and
        values again when they go on. They go on at the end, unless what was served is gone."""
        async with self._changing:
            await self.client.post("/pause?mode=keep&clear_cache=true", timeout=PAUSE_SECONDS)
            try:
                await self._settle()
                yield Change(self)
            finally:
                if self.lost is None:
                    # Also where the caller was cancelled: nobody else would resume.
                    await asyncio.shield(self.client.post("/resume", timeout=PAUSE_SECONDS))
