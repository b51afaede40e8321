"""The `files` route: every engine loads the policy from the published folder, or from an uploaded copy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.http.retry import RetryPolicy
from instar.sync.base import SyncRoute
from instar.types import Policy

TRANSIENT_ERRORS = (EngineUnavailable, ConnectionError, TimeoutError)
RETRY = RetryPolicy(first_delay=0.25, max_delay=math.inf, jitter=(0.5, 1.5))


class FileSync(SyncRoute):
    description = "files: the engines read the published files, or copies that are uploaded to them"

    def __init__(self, *, timeout: float = 120.0, attempts: int = 5, retry: RetryPolicy = RETRY) -> None:
        """``timeout`` is the limit in seconds for updating one engine, including retries."""
        self._timeout = timeout
        self._attempts = attempts
        self._retry = retry

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        return list(await asyncio.gather(*(self._load(policy, engine) for engine in engines)))

    async def _load(self, policy: Policy, engine: Engine) -> Exception | None:
        name = f"version {policy.version} of {policy.policy_id}"
        last_error: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout):
                for attempt in range(self._attempts):
                    try:
                        await engine.load(await engine.upload_files(policy))
                        return None
                    except TRANSIENT_ERRORS as error:
                        last_error = error
                    if attempt + 1 < self._attempts:
                        await asyncio.sleep(self._retry.delay(attempt))
        except TimeoutError:
            reason = f"; last error: {last_error}" if last_error else ""
            return SyncError(f"{name} was not loaded within {self._timeout:g} s{reason}")
        except (EngineError, OSError) as error:
            failure = SyncError(f"{name} could not be loaded: {error}")
            last_error = error
        else:
            failure = SyncError(f"{name} could not be loaded in {self._attempts} attempts: {last_error}")
        failure.__cause__ = last_error
        return failure
