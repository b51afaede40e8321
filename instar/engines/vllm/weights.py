"""The version of a vLLM server's own weights, and the pause in which they change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.reply import VllmReply
from instar.errors import EngineError, EngineUnavailable

PAUSE_SECONDS = 120.0
"""The deadline for the current step to finish."""
RESUME_SECONDS = 30.0
NO_VERSION = -1
"""The version of weights that do not belong to any policy."""


@dataclass(frozen=True, slots=True)
class PauseTiming:
    quiet: float = 0.005
    """Seconds without any data after which all sampled tokens count as received."""
    settle: float = 10.0
    """Seconds after which replies that still receive data are aborted."""
    resume_delays: tuple[float, ...] = (0.1, 0.5, 2.0)
    """Seconds to wait before each further attempt to end a pause."""


class WeightChange:
    def __init__(self) -> None:
        self.started = False
        self.version: int | None = None

    def start(self) -> None:
        """Declare the old weights lost: unless ``finish`` is called, nothing is served."""
        self.started = True

    def finish(self, version: int) -> None:
        """Declare the weights complete. They become the given version when the pause ends."""
        self.started = True
        self.version = version


class ServerWeights:
    """Tracks the version of one server's weights and changes them in pauses. ``replies`` are the replies in
    progress; each one is told about every change."""

    def __init__(self, client: VllmClient, timing: PauseTiming | None = None) -> None:
        self.client = client
        self._timing = timing or PauseTiming()
        self.version = 0
        """The version of the tokens that are sampled now."""
        self.replies: set[VllmReply] = set()
        self.stores_version = False
        """True if the server stores the version for other clients."""
        self._lock = asyncio.Lock()

    def reset(self) -> None:
        """Record that the server has just started and serves the base model."""
        self.version = 0

    def require_served(self) -> None:
        if self.version == NO_VERSION:
            raise EngineUnavailable(
                "A weight change of the vLLM server failed; it serves no requests until a policy is loaded."
            )

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[WeightChange]:
        """Pause sampling while the block changes the weights. Everything computed under the old weights is
        dropped, and requests in flight compute their keys and values again. They continue under the version
        that the change finished with, or the old version if the change did not start; they are aborted if it
        started and did not finish."""
        async with self._lock:
            change = WeightChange()
            settling: asyncio.Task[None] | None = None
            try:
                # The pause also clears the prefix cache, including the blocks of running requests.
                await self.client.post("/pause?mode=keep&clear_cache=true", timeout=PAUSE_SECONDS)
                settling = asyncio.create_task(self._settle())
                yield change
                if change.version is not None:
                    await settling
                    self._switch(change.version)
                    await self.store_version(change.version)
            finally:
                if settling is not None:
                    settling.cancel()
                if change.started and change.version != self.version:
                    self._invalidate()
                else:
                    # Also needed if the caller was cancelled, or if the pause began and its response was
                    # lost: nothing else would resume the server.
                    await asyncio.shield(self._resume())

    async def _resume(self) -> None:
        """Resume the server. If that fails, stop serving until a policy is loaded again."""
        for delay in (*self._timing.resume_delays, None):
            try:
                await self.client.post("/resume", timeout=RESUME_SECONDS)
                return
            except EngineError:
                if delay is None:
                    self._invalidate()
                    raise
            await asyncio.sleep(delay)

    def _received_bytes(self) -> int:
        return sum(reply.received_bytes for reply in self.replies)

    async def _settle(self) -> None:
        """Wait until every token sampled before the pause has arrived. vLLM has sent all of them when it
        responds to the pause, but they may still be in transit. Replies that keep receiving data are aborted,
        because the versions of their tokens would be unknown."""
        before = self._received_bytes()
        try:
            async with asyncio.timeout(self._timing.settle):
                while True:
                    await asyncio.sleep(self._timing.quiet)
                    if (now := self._received_bytes()) == before:
                        return
                    before = now
        except TimeoutError:
            self._abort_replies()

    async def store_version(self, version: int) -> None:
        """Store the version's name on the server for other clients. Sampling does not depend on it."""
        if self.stores_version:
            with contextlib.suppress(EngineError):
                await self.client.post("/update_weight_version", {"new_version": str(version)})

    def _switch(self, version: int) -> None:
        for reply in self.replies:
            reply.mark_version(self.version)
        self.version = version

    def _invalidate(self) -> None:
        self.version = NO_VERSION
        self._abort_replies()

    def _abort_replies(self) -> None:
        for reply in [*self.replies]:
            reply.abort()
