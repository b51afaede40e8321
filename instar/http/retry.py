"""Retries with exponential backoff and jitter, and the ``Retry-After`` header."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

T = TypeVar("T")

MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Delays between attempts in seconds. They double from ``first_delay`` to ``max_delay`` and are
    multiplied by random factors in the range ``jitter``, so that clients do not retry at the same time."""

    first_delay: float = 0.25
    max_delay: float = 8.0
    jitter: tuple[float, float] = (0.5, 1.0)

    def delay(self, retries: int, *, at_least: float = 0.0, rng: random.Random | None = None) -> float:
        """Return the seconds to wait before the next retry, after ``retries`` earlier ones."""
        doubled = self.first_delay * 2 ** min(retries, MAX_DOUBLINGS)
        return max(at_least, min(self.max_delay, doubled) * (rng or random).uniform(*self.jitter))

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        retry_on: type[Exception] | tuple[type[Exception], ...],
        seconds: float,
    ) -> T:
        """Call ``attempt`` until it succeeds, and return its result.

        Only errors of the types ``retry_on`` are retried, after at least ``error.retry_after`` seconds, if
        set. The error is raised if the next attempt would start more than ``seconds`` after the first one.
        """
        deadline = time.monotonic() + seconds
        retries = 0
        while True:
            try:
                return await attempt()
            except retry_on as error:
                delay = self.delay(retries, at_least=getattr(error, "retry_after", None) or 0.0)
                if time.monotonic() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
            retries += 1


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds to wait according to a ``Retry-After`` header (a number of seconds or an HTTP date),
    or None if it is missing or invalid."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
