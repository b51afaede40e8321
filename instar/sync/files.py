"""The route `files`: every engine loads the policy from its published folder, or from an uploaded copy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.http.retry import RetryPolicy
from instar.sync.base import Sync
from instar.types import Policy

TRANSIENT = (EngineUnavailable, ConnectionError, TimeoutError)
RETRY = RetryPolicy(first_delay=0.25, max_delay=math.inf, jitter=(0.5, 1.5))


class FileSync(Sync):
    """Loads artifacts that engines can read: adapter and weights folders, the base model, or a sampler on a
    service."""

    def __init__(self, *, deadline: float = 120.0, attempts: int = 5, retry: RetryPolicy = RETRY) -> None:
        """``deadline`` limits the time to load the policy into one engine, including all attempts, in
        seconds."""
        self._deadline = deadline
        self._attempts = attempts
        self._retry = retry

    @property
    def description(self) -> str:
        return (
            "files: the engines read the published files, which are uploaded to machines that cannot see them"
        )

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        return list(await asyncio.gather(*(self._load(policy, engine) for engine in engines)))

    async def _load(self, policy: Policy, engine: Engine) -> Exception | None:
        name = f"version {policy.version} of {policy.policy_id}"
        last: Exception | None = None
        try:
            async with asyncio.timeout(self._deadline):
                for attempt in range(self._attempts):
                    try:
                        await engine.load(await engine.upload_files(policy))
                        return None
                    except TRANSIENT as error:
                        last = error
                    if attempt + 1 < self._attempts:
                        await asyncio.sleep(self._retry.delay(attempt))
        except TimeoutError:
            reason = f"; last error: {last}" if last else ""
            return SyncError(f"{name} was not loaded within {self._deadline:g} s{reason}")
        except (EngineError, OSError) as error:
            return _with_cause(SyncError(f"{name} could not be loaded: {error}"), error)
        return _with_cause(
            SyncError(f"{name} could not be loaded in {self._attempts} attempts: {last}"), last
        )


def _with_cause(error: SyncError, cause: Exception | None) -> SyncError:
    error.__cause__ = cause
    return error
