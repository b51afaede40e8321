"""Brings the head to the engines, and again to those that fall behind: a failed sync stops nobody."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, InstarError
from instar.sync.base import Sync, WayError
from instar.types import Policy

T = TypeVar("T")
Engines = Callable[[], Awaitable[list[Engine]]]

LOOK_EVERY = 3.0
"""Seconds between two looks at which versions the engines serve."""
LONGEST_WAIT = 60.0
"""Between two attempts, after failures."""
ANSWER_WITHIN = 3.0
"""Seconds for an engine to say which version it serves."""
MOST_REFUSALS = 4
"""Attempts in a row that every engine, or the way to them, may refuse, before the run cannot go on: its
samples would all be of an old version."""


class Pusher:
    def __init__(
        self,
        sync: Sync,
        engines: Engines,
        log: Callable[[str], None],
        *,
        look_every: float = LOOK_EVERY,
    ) -> None:
        self.sync = sync
        self._engines = engines
        self._log = log
        self._look_every = look_every
        self._refusals = 0
        self._pushing = False
        self._ending = False
        self.report: dict[str, float] = {}
        """Figures of the last push to all engines."""

    async def push(self, policy: Policy) -> None:
        """To every engine. One that it does not reach stays on the version that it reports; the agent goes on
        meanwhile. Raises what the engines say when all of them go on refusing."""
        engines = await self._engines()
        began = time.monotonic()
        failed = await self._push(policy, engines)
        self.report = {
            "sync_seconds": time.monotonic() - began,
            "engines": float(len(engines)),
            "engines_behind": float(failed),
        }

    async def while_waiting(self, policy: Policy, waiting: Coroutine[Any, Any, T]) -> T:
        """Await that, and meanwhile bring the policy to engines that do not serve it: ones that a push did
        not reach, or that were started again."""
        self._ending = False
        waited = asyncio.create_task(waiting)
        keeping_up = asyncio.create_task(self._keep_up(policy))
        try:
            await asyncio.wait({waited, keeping_up}, return_when=asyncio.FIRST_COMPLETED)
            if keeping_up.done():
                keeping_up.result()
            return await waited
        finally:
            waited.cancel()
            self._ending = True
            # Weights on their way out of the backend are let go: they must not change meanwhile.
            if not (self._pushing and self.sync.live):
                keeping_up.cancel()
            await asyncio.gather(waited, keeping_up, return_exceptions=True)

    async def _keep_up(self, policy: Policy) -> None:
        wait = self._look_every
        while not self._ending:
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))
            behind = await self._behind(policy)
            if not behind:
                wait = self._look_every
            elif await self._push(policy, behind, again=True):
                wait = min(2 * wait, LONGEST_WAIT)

    async def _behind(self, policy: Policy) -> list[Engine]:
        """Those that answer and serve something else. One that does not answer is coming up, or is gone."""
        engines = await self._engines()
        versions = await asyncio.gather(*map(_version, engines))
        return [
            engine
            for engine, version in zip(engines, versions, strict=True)
            if version is not None and version != policy.version
        ]

    async def _push(self, policy: Policy, engines: Sequence[Engine], *, again: bool = False) -> int:
        """How many it did not reach."""
        self._pushing = True
        try:
            outcomes = await self.sync.push(policy, engines)
        finally:
            self._pushing = False
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            self._log(f"version {policy.version} did not reach an engine: {failure}")
        if again and len(failures) < len(engines):
            self._log(f"version {policy.version} reached {len(engines) - len(failures)} engine(s) at last")
        if engines and len(failures) == len(engines) and all(map(_is_refusal, failures)):
            self._refusals += 1
            if self._refusals >= MOST_REFUSALS:
                raise failures[0]
        else:
            self._refusals = 0
        return len(failures)


def _is_refusal(failure: Exception) -> bool:
    """Whether the engine was there and said no, or there was no way to it."""
    cause = failure.__cause__
    return isinstance(cause, EngineError | WayError) and not isinstance(cause, EngineUnavailable)


async def _version(engine: Engine) -> int | None:
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            return (await engine.status()).version
    except (InstarError, OSError, TimeoutError):
        return None
