"""Pushes the policy's current version to the engines, and repeats the push for engines that fall behind."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, InstarError
from instar.sync.base import RouteError, Sync
from instar.types import Policy

logger = logging.getLogger(__name__)

T = TypeVar("T")
ListEngines = Callable[[], Awaitable[list[Engine]]]

POLL_SECONDS = 3.0
"""The interval in seconds at which the versions that the engines serve are checked."""
MAX_RETRY_SECONDS = 60.0
"""The longest delay in seconds between two attempts after failures."""
STATUS_TIMEOUT = 3.0
"""The time in seconds that an engine has to report the version that it serves."""
MAX_REFUSALS = 4
"""Maximum number of consecutive attempts that all engines, or the route to them, may refuse. After that the
run fails, because all its samples would come from an old version."""


class PolicyPublisher:
    def __init__(self, sync: Sync, engines: ListEngines, *, poll_seconds: float = POLL_SECONDS) -> None:
        self.sync = sync
        self._engines = engines
        self._poll_seconds = poll_seconds
        self._refusals = 0
        self._is_pushing = False
        self._is_ending = False
        self.report: dict[str, float] = {}
        """Metrics of the last push to all engines."""

    async def push(self, policy: Policy) -> None:
        """Push the policy to every engine. An engine that cannot be reached keeps its current version, and
        the run continues. Raises the engines' error if all of them keep refusing."""
        engines = await self._engines()
        started = time.monotonic()
        failures = await self._push_to(policy, engines)
        self.report = {
            "sync_seconds": time.monotonic() - started,
            "engines": float(len(engines)),
            "engines_behind": float(failures),
        }

    async def sync_while_waiting(self, policy: Policy, waiting: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``waiting``. While waiting, push the policy to engines that serve a different
        version, because a push did not reach them or because they were restarted."""
        self._is_ending = False
        waiting_task = asyncio.create_task(waiting)
        sync_task = asyncio.create_task(self._sync_lagging_engines(policy))
        try:
            await asyncio.wait({waiting_task, sync_task}, return_when=asyncio.FIRST_COMPLETED)
            if sync_task.done():
                sync_task.result()
            return await waiting_task
        finally:
            waiting_task.cancel()
            self._is_ending = True
            # A push that reads the backend's weights must finish before the weights may change.
            if not (self._is_pushing and self.sync.live):
                sync_task.cancel()
            await asyncio.gather(waiting_task, sync_task, return_exceptions=True)

    async def _sync_lagging_engines(self, policy: Policy) -> None:
        delay = self._poll_seconds
        while not self._is_ending:
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            lagging = await self._find_lagging_engines(policy)
            if not lagging:
                delay = self._poll_seconds
            elif await self._push_to(policy, lagging, is_retry=True):
                delay = min(2 * delay, MAX_RETRY_SECONDS)

    async def _find_lagging_engines(self, policy: Policy) -> list[Engine]:
        """Return the engines that report a different version, except those that do not respond."""
        engines = await self._engines()
        versions = await asyncio.gather(*map(_served_version, engines))
        return [
            engine
            for engine, version in zip(engines, versions, strict=True)
            if version is not None and version != policy.version
        ]

    async def _push_to(self, policy: Policy, engines: Sequence[Engine], *, is_retry: bool = False) -> int:
        """Push the policy to ``engines`` and return the number of engines that the push did not reach."""
        self._is_pushing = True
        try:
            outcomes = await self.sync.push(policy, engines)
        finally:
            self._is_pushing = False
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            logger.warning("version %s did not reach an engine: %s", policy.version, failure)
        if is_retry and len(failures) < len(engines):
            reached = len(engines) - len(failures)
            logger.info("version %s reached %s engine(s) at last", policy.version, reached)
        if engines and len(failures) == len(engines) and all(map(_is_refusal, failures)):
            self._refusals += 1
            if self._refusals >= MAX_REFUSALS:
                raise failures[0]
        else:
            self._refusals = 0
        return len(failures)


def _is_refusal(failure: Exception) -> bool:
    """Return True if the engine responded and refused, or if there was no route to it."""
    cause = failure.__cause__
    return isinstance(cause, EngineError | RouteError) and not isinstance(cause, EngineUnavailable)


async def _served_version(engine: Engine) -> int | None:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT):
            return (await engine.status()).version
    except (InstarError, OSError, TimeoutError):
        return None
