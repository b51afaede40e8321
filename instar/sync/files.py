"""Carries a policy by telling every engine to load it from where it was published, or from a copy of that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.sync.base import Sync
from instar.types import Policy

TRANSIENT = (EngineUnavailable, ConnectionError, TimeoutError)


class FileSync(Sync):
    """For artifacts that the engines can read themselves: adapter and weights folders, the base model,
    a sampler at a service."""

    def __init__(
        self, *, deadline: float = 120.0, attempts: int = 5, first_wait: float = 0.25, seed: int | None = None
    ) -> None:
        """``deadline`` bounds one engine's load with all its attempts, in seconds."""
        self._deadline = deadline
        self._attempts = attempts
        self._first_wait = first_wait
        self._random = random.Random(seed)

    @property
    def description(self) -> str:
        return "files: the engines read what is published, or are sent it where they do not see it"

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        return list(await asyncio.gather(*(self._load(policy, engine) for engine in engines)))

    async def _load(self, policy: Policy, engine: Engine) -> Exception | None:
        where = f"version {policy.version} of {policy.policy_id}"
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
                        await asyncio.sleep(self.backoff(attempt))
        except TimeoutError:
            reason = f"; last error: {last}" if last else ""
            return SyncError(f"{where} was not loaded within {self._deadline:g} s{reason}")
        except (EngineError, OSError) as error:
            return _caused(SyncError(f"{where} could not be loaded: {error}"), error)
        return _caused(SyncError(f"{where} could not be loaded in {self._attempts} attempts: {last}"), last)

    def backoff(self, attempt: int) -> float:
        """Exponential, with jitter so that engines do not come back all at once."""
        return self._first_wait * 2**attempt * self._random.uniform(0.5, 1.5)


def _caused(error: SyncError, cause: Exception | None) -> SyncError:
    error.__cause__ = cause
    return error
