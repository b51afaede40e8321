"""Push the current policy to the engines, and retry the push for engines that lag behind."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, InstarError
from instar.sync.base import RouteError, SyncRoute
from instar.types import Artifact, Policy

logger = logging.getLogger(__name__)

T = TypeVar("T")
ListEngines = Callable[[], Awaitable[list[Engine]]]

POLL_INTERVAL_SECONDS = 3.0
"""How often the trainer checks which versions the engines serve."""
MAX_RETRY_DELAY_SECONDS = 60.0
RENEWAL_LIFETIME_FRACTION = 2 / 3
"""A published sampler is exported again after this fraction of its lifetime."""
STATUS_TIMEOUT_SECONDS = 3.0
MAX_REFUSALS = 4
"""The run fails after this many consecutive pushes that every engine, or the route itself, refused.
Otherwise, it would continue with samples from an old version."""


@dataclass(eq=False)
class PolicyPublisher:
    sync: SyncRoute
    list_engines: ListEngines
    every: int = 1
    """`push_if_due` pushes a policy if its version is at least this much higher than that of the last push.
    Tombstoned versions count too."""
    poll_seconds: float = POLL_INTERVAL_SECONDS

    def __post_init__(self) -> None:
        self._skipped: list[Policy] = []
        """The policies that are newer than the pushed one, oldest first."""
        self._pushed: Policy | None = None
        self._is_due = False
        """True if the next policy must be pushed regardless of ``every``."""
        self._refusals = 0
        self._is_pushing = False
        self._should_stop = False
        self.report: dict[str, float] = {}
        """The metrics of the last push to all engines, without its duration if a policy was skipped since."""
        self.renewal_time: float | None = None
        """The Unix time at which the newest policy must be exported again and pushed, because an artifact
        that engines use expires soon, or None if none expires."""

    @property
    def _pushed_version(self) -> int | None:
        return None if self._pushed is None else self._pushed.version

    def require_push(self) -> None:
        """Push the next policy even if it is not due. After a recovery, the last push may be tombstoned, and
        after a rewind, it is worse than the next policy."""
        self._skipped.clear()
        self._pushed, self._is_due = None, True

    async def push_if_due(self, policy: Policy) -> None:
        self._skipped.append(policy)
        if self._is_due or policy.version - (self._pushed_version or 0) >= self.every:
            await self.push(policy)
            return
        self.report.pop("sync_seconds", None)
        if self.renewal_time is None:  # engines that restart load this policy
            self.renewal_time = compute_renewal_time(policy.artifact)

    async def push_last(self) -> None:
        """Push the newest policy, unless it has been pushed, and again while all engines refuse it. Raises
        SyncError if they keep refusing it."""
        if self._skipped:
            await self.push(self._skipped[-1])
        while self._refusals and self._pushed is not None:
            await asyncio.sleep(self.poll_seconds)
            await self.push(self._pushed)

    async def push(self, policy: Policy) -> None:
        """Push the policy to every engine. If an engine cannot be reached, it keeps its version, and the run
        continues. Raises SyncError if `MAX_REFUSALS` pushes in a row were refused."""
        self._skipped.clear()
        self._pushed, self._is_due = policy, False
        self.renewal_time = compute_renewal_time(policy.artifact)
        engines = await self.list_engines()
        started_at = time.monotonic()
        failure_count = await self._push_to(policy, engines)
        self.report = {
            "sync_seconds": time.monotonic() - started_at,
            "engines": float(len(engines)),
            "engines_behind": float(failure_count),
        }

    async def sync_while_waiting(self, policy: Policy, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` and return its result. Until then, push the policy to engines that serve a
        version that is neither the last push nor a newer policy, because they were restarted or missed it."""
        self._should_stop = False
        waiting_task = asyncio.create_task(coroutine)
        sync_task = asyncio.create_task(self._sync_lagging_engines(policy))
        try:
            await asyncio.wait({waiting_task, sync_task}, return_when=asyncio.FIRST_COMPLETED)
            if sync_task.done():
                sync_task.result()
            return await waiting_task
        finally:
            waiting_task.cancel()
            self._should_stop = True
            # A live push reads the backend's weights and must finish before the weights change.
            if not (self._is_pushing and self.sync.is_live):
                sync_task.cancel()
            await asyncio.gather(waiting_task, sync_task, return_exceptions=True)

    async def _sync_lagging_engines(self, policy: Policy) -> None:
        delay = self.poll_seconds
        while not self._should_stop:
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            engines = await self.list_engines()
            versions = await asyncio.gather(*map(_get_served_version, engines))
            pairs = zip(engines, versions, strict=True)
            # Engines that restart load the newest policy, even if it was not pushed.
            skipped = (skipped.version for skipped in self._skipped)
            current = {None, policy.version, self._pushed_version, *skipped}
            lagging = [engine for engine, version in pairs if version not in current]
            if not lagging:
                delay = self.poll_seconds
            elif await self._push_to(policy, lagging, is_retry=True):
                delay = min(2 * delay, MAX_RETRY_DELAY_SECONDS)

    async def _push_to(self, policy: Policy, engines: Sequence[Engine], *, is_retry: bool = False) -> int:
        """Push the policy. Return the number of engines for which the push failed."""
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
            logger.info("version %s reached %s engine(s) after a retry", policy.version, reached)
        # Only an error response from an engine or a failed route counts as a refusal. An unavailable engine
        # may become available again.
        refusals = [
            failure
            for failure in failures
            if isinstance(failure.__cause__, EngineError | RouteError)
            and not isinstance(failure.__cause__, EngineUnavailable)
        ]
        self._refusals = self._refusals + 1 if engines and len(refusals) == len(engines) else 0
        if self._refusals >= MAX_REFUSALS:
            raise failures[0]
        return len(failures)


def compute_renewal_time(artifact: Artifact) -> float | None:
    """Return the Unix time at which the artifact must be exported again, or None if it does not expire."""
    expires, now = artifact.expires_at, time.time()
    return None if expires is None else now + RENEWAL_LIFETIME_FRACTION * max(0.0, expires - now)


async def _get_served_version(engine: Engine) -> int | None:
    """Return the version that the engine reports, or None if the engine does not respond."""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
            return (await engine.status()).version
    except (InstarError, OSError, TimeoutError):
        return None
