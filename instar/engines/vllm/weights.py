"""Which version of the policy a vLLM server's own weights are, and the pause in which they change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.reply import VllmReply
from instar.errors import EngineError, EngineUnavailable

PAUSE_SECONDS = 120.0
"""How long a step under way may take to end."""
QUIET_SECONDS = 0.005
"""How long no reply must have brought anything before all that was sampled counts as come."""
SETTLE_SECONDS = 10.0
RESUME_SECONDS = 30.0
RESUME_WAITS = (0.1, 0.5, 2.0)
"""Seconds before each further try to end a pause."""
NO_VERSION = -1
"""The version of weights that are no policy's."""


class WeightChange:
    """Weights that are being replaced."""

    def __init__(self) -> None:
        self.started = False
        self.version: int | None = None

    def start(self) -> None:
        """From here on what was served is gone: if ``serves`` is not called, nothing is served."""
        self.started = True

    def finish(self, version: int) -> None:
        """The weights in place are whole, and of this version. It counts once the pause ends."""
        self.started = True
        self.version = version


class ServerWeights:
    """Of one server. ``replies``: those under way, which are told of every change."""

    def __init__(self, client: VllmClient) -> None:
        self.client = client
        self.version = 0
        """Of what is sampled from now on."""
        self.replies: set[VllmReply] = set()
        self.stores_version = False
        """Whether the server keeps the version's name for others to ask for."""
        self._changing = asyncio.Lock()

    def reset(self) -> None:
        """The server has just come up: it serves the base model."""
        self.version = 0

    def require_served(self) -> None:
        if self.version == NO_VERSION:
            raise EngineUnavailable(
                "a change of the vLLM server's weights has failed: it serves nothing until a policy is loaded"
            )

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[WeightChange]:
        """Within, nothing is sampled, and nothing that was computed under the old weights is kept: requests
        in flight compute their keys and values again when they go on. That is at the end, under what the
        change serves, or what was served before where it did not begin; where it began and serves nothing,
        they are given up."""
        async with self._changing:
            change = WeightChange()
            settling: asyncio.Task[None] | None = None
            try:
                # The pause also empties the prefix cache, of running requests' blocks too.
                await self.client.post("/pause?mode=keep&clear_cache=true", timeout=PAUSE_SECONDS)
                settling = asyncio.create_task(self._settle())
                yield change
                if change.version is not None:
                    await settling
                    self._turn(change.version)
                    await self.store_version(change.version)
            finally:
                if settling is not None:
                    settling.cancel()
                if change.started and change.version != self.version:
                    self._lose()
                else:
                    # Also where the caller was cancelled, or the pause came and its answer did not: nobody
                    # else would resume.
                    await asyncio.shield(self._resume())

    async def _resume(self) -> None:
        """Where the server does not go on, nothing is served, so that a policy is brought again."""
        for wait in (*RESUME_WAITS, None):
            try:
                await self.client.post("/resume", timeout=RESUME_SECONDS)
                return
            except EngineError:
                if wait is None:
                    self._lose()
                    raise
            await asyncio.sleep(wait)

    def _arrived(self) -> int:
        return sum(reply.received_bytes for reply in self.replies)

    async def _settle(self) -> None:
        """Until every token that was sampled before the pause has come: vLLM has handed out all of them when
        it says that it is paused, and then for a moment they are still on their way here. Replies that do
        not come to rest are given up: their tokens could not be told apart."""
        before = self._arrived()
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while True:
                    await asyncio.sleep(QUIET_SECONDS)
                    if (now := self._arrived()) == before:
                        return
                    before = now
        except TimeoutError:
            self._cut()

    async def store_version(self, version: int) -> None:
        """Give the server the version's name, for others who ask it: what is served does not depend on it."""
        if self.stores_version:
            with contextlib.suppress(EngineError):
                await self.client.post("/update_weight_version", {"new_version": str(version)})

    def _turn(self, version: int) -> None:
        for reply in self.replies:
            reply.mark_version(self.version)
        self.version = version

    def _lose(self) -> None:
        self.version = NO_VERSION
        self._cut()

    def _cut(self) -> None:
        for reply in [*self.replies]:
            reply.abort()
