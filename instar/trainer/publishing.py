"""Brings the head to the engines, and is_retry to those that fall behind: a failed sync stops nobody."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, InstarError
from instar.sync.base import RouteError, Sync
from instar.types import Policy

T = TypeVar("T")
ListEngines = Callable[[], Awaitable[list[Engine]]]

POLL_SECONDS = 3.0
"""Seconds between two looks at which versions the engines serve."""
MAX_RETRY_SECONDS = 60.0
"""Between two attempts, after failures."""
STATUS_TIMEOUT = 3.0
"""Seconds for an engine to say which version it serves."""
MAX_REFUSALS = 4
"""Attempts in a row that every engine, or the way to them, may refuse, before the run cannot go on: its
samples would all be of an old version."""


class PolicyPublisher:
    def __init__(
        self,
        sync: Sync,
        engines: ListEngines,
        log: Callable[[str], None],
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.sync = sync
        self._engines = engines
        self._log = log
        self._poll_seconds = poll_seconds
        self._refusals = 0
        self._is_pushing = False
        self._is_ending = False
        self.report: dict[str, float] = {}
        """Figures of the last push to all engines."""

    async def push(self, policy: Policy) -> None:
        """To every engine. One that it does not reach stays on the version that it reports; the agent goes on
        meanwhile. Raises what the engines say when all of them go on refusing."""
        engines = await self._engines()
        began = time.monotonic()
        failed = await self._push_to(policy, engines)
        self.report = {
            "sync_seconds": time.monotonic() - began,
            "engines": float(len(engines)),
            "engines_behind": float(failed),
        }

    async def sync_while_waiting(self, policy: Policy, waiting: Coroutine[Any, Any, T]) -> T:
        """Await that, and meanwhile bring the policy to engines that do not serve it: ones that a push did
        not reach, or that were started is_retry."""
        self._is_ending = False
        waited = asyncio.create_task(waiting)
        keeping_up = asyncio.create_task(self._sync_lagging_engines(policy))
        try:
            await asyncio.wait({waited, keeping_up}, return_when=asyncio.FIRST_COMPLETED)
            if keeping_up.done():
                keeping_up.result()
            return await waited
        finally:
            waited.cancel()
            self._is_ending = True
            # Weights on their way out of the backend are let go: they must not change meanwhile.
            if not (self._is_pushing and self.sync.live):
                keeping_up.cancel()
            await asyncio.gather(waited, keeping_up, return_exceptions=True)

    async def _sync_lagging_engines(self, policy: Policy) -> None:
        wait = self._poll_seconds
        while not self._is_ending:
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))
            behind = await self._find_lagging_engines(policy)
            if not behind:
                wait = self._poll_seconds
            elif await self._push_to(policy, behind, is_retry=True):
                wait = min(2 * wait, MAX_RETRY_SECONDS)

    async def _find_lagging_engines(self, policy: Policy) -> list[Engine]:
        """Those that answer and serve something else. One that does not answer is coming up, or is gone."""
        engines = await self._engines()
        versions = await asyncio.gather(*map(_served_version, engines))
        return [
            engine
            for engine, version in zip(engines, versions, strict=True)
            if version is not None and version != policy.version
        ]

    async def _push_to(self, policy: Policy, engines: Sequence[Engine], *, is_retry: bool = False) -> int:
        """How many it did not reach."""
        self._is_pushing = True
        try:
            outcomes = await self.sync.push(policy, engines)
        finally:
            self._is_pushing = False
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            self._log(f"version {policy.version} did not reach an engine: {failure}")
        if is_retry and len(failures) < len(engines):
            self._log(f"version {policy.version} reached {len(engines) - len(failures)} engine(s) at last")
        if engines and len(failures) == len(engines) and all(map(_is_refusal, failures)):
            self._refusals += 1
            if self._refusals >= MAX_REFUSALS:
                raise failures[0]
        else:
            self._refusals = 0
        return len(failures)


def _is_refusal(failure: Exception) -> bool:
    """Whether the engine was there and said no, or there was no way to it."""
    cause = failure.__cause__
    return isinstance(cause, EngineError | RouteError) and not isinstance(cause, EngineUnavailable)


async def _served_version(engine: Engine) -> int | None:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT):
            return (await engine.status()).version
    except (InstarError, OSError, TimeoutError):
        return None
