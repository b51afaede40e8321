"""Track the version of a vLLM server's own weights, and pause sampling while they change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from instar.async_utils import run_to_completion
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.reply import VllmReply
from instar.errors import EngineError, EngineUnavailable

PAUSE_TIMEOUT_SECONDS = 120.0
RESUME_TIMEOUT_SECONDS = 30.0
NO_VERSION = -1
"""The version if the weights do not belong to any policy."""


@dataclass(frozen=True, slots=True)
class PauseTiming:
    quiet_seconds: float = 0.005
    """If no data arrives for this many seconds, all sampled tokens are assumed to have arrived."""
    settle_timeout: float = 10.0
    """Replies that still receive data after this many seconds are aborted."""
    resume_delays: tuple[float, ...] = (0.1, 0.5, 2.0)
    """The delays in seconds between attempts to resume the server."""


@dataclass
class WeightChange:
    has_started: bool = False
    version: int | None = None
    """The version of the new weights, or None until they are complete."""

    def start(self) -> None:
        """Record that the old weights are being overwritten. Until ``finish``, no policy can be served."""
        self.has_started = True

    def finish(self, version: int) -> None:
        """Record that the weights are complete. They are served as ``version`` when the pause ends."""
        self.has_started = True
        self.version = version


class ServerWeights:
    """Tracks the version of one server's weights. ``replies`` contains the replies in progress."""

    def __init__(self, client: VllmClient, timing: PauseTiming | None = None) -> None:
        self.client = client
        self._timing = timing or PauseTiming()
        self.version = 0
        """The version under which the server samples now, or NO_VERSION."""
        self.replies: set[VllmReply] = set()
        self.can_store_version = False
        """True if the server can store the version of its weights, to report it with replies."""
        self._lock = asyncio.Lock()

    def require_served(self) -> None:
        if self.version == NO_VERSION:
            raise EngineUnavailable(
                "The vLLM server serves no policy, because a weight change failed; load a policy."
            )

    @asynccontextmanager
    async def pause_sampling(self) -> AsyncGenerator[WeightChange]:
        """Pause sampling while the block changes the weights. Afterwards, requests in flight recompute their
        keys and values. They continue under the new version, or under the old version if the change did not
        start. They are aborted if the change started but did not finish, or if the server cannot resume."""
        async with self._lock:
            change = WeightChange()
            settle_task: asyncio.Task[None] | None = None
            try:
                # The pause also clears the prefix cache, including the blocks of running requests.
                await self.client.post("/pause?mode=keep&clear_cache=true", timeout=PAUSE_TIMEOUT_SECONDS)
                settle_task = asyncio.create_task(self._settle())
                yield change
                if change.version is not None:
                    await settle_task
                    for reply in self.replies:
                        reply.mark_version(self.version)
                    self.version = change.version
                    await self.store_version(change.version)
            finally:
                if settle_task is not None:
                    settle_task.cancel()
                if change.has_started and change.version != self.version:
                    self._invalidate()
                else:
                    # Resume even if the caller was cancelled or the response to the pause was lost.
                    await run_to_completion(self._resume())

    async def _resume(self) -> None:
        for delay in (*self._timing.resume_delays, None):
            try:
                await self.client.post("/resume", timeout=RESUME_TIMEOUT_SECONDS)
                return
            except EngineError:
                if delay is None:
                    self._invalidate()
                    raise
            await asyncio.sleep(delay)

    def _count_received_bytes(self) -> int:
        return sum(reply.received_bytes for reply in self.replies)

    async def _settle(self) -> None:
        """Wait until every token that was sampled before the pause has arrived. Replies that still receive
        data are aborted, because the versions of their tokens would be unknown."""
        previous = self._count_received_bytes()
        try:
            async with asyncio.timeout(self._timing.settle_timeout):
                while True:
                    await asyncio.sleep(self._timing.quiet_seconds)
                    if (current := self._count_received_bytes()) == previous:
                        return
                    previous = current
        except TimeoutError:
            self._abort_replies()

    async def store_version(self, version: int) -> None:
        if self.can_store_version:
            with contextlib.suppress(EngineError):  # sampling does not depend on the stored version
                await self.client.post("/update_weight_version", {"new_version": str(version)})

    def _invalidate(self) -> None:
        self.version = NO_VERSION
        self._abort_replies()

    def _abort_replies(self) -> None:
        for reply in [*self.replies]:
            reply.abort()
