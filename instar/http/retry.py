"""Retries of failed calls: exponential backoff with jitter, and the ``Retry-After`` header."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import count
from typing import TypeVar

T = TypeVar("T")

MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Delays between attempts, in seconds. The delay starts at ``first_delay`` and doubles up to
    ``max_delay``. Each delay is multiplied by a random factor in the range ``jitter``, so that many clients
    do not retry at the same time."""

    first_delay: float = 0.25
    max_delay: float = 8.0
    jitter: tuple[float, float] = (0.5, 1.0)

    def delay(self, failures: int, *, at_least: float = 0.0, rng: random.Random | None = None) -> float:
        """Return the seconds to wait after ``failures`` + 1 failures in a row, at least ``at_least``."""
        doubled = self.first_delay * 2 ** min(failures, MAX_DOUBLINGS)
        return max(at_least, min(self.max_delay, doubled) * (rng or random).uniform(*self.jitter))

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        retry_on: type[Exception] | tuple[type[Exception], ...],
        seconds: float,
    ) -> T:
        """Call ``attempt`` until it succeeds, and return its result. Errors of the types ``retry_on`` are
        retried, at the earliest after the seconds in the error's attribute ``retry_after``, if any. The error
        is raised if the next attempt would begin later than ``seconds`` after the start."""
        deadline = time.monotonic() + seconds
        for failures in count():
            try:
                return await attempt()
            except retry_on as error:
                delay = self.delay(failures, at_least=getattr(error, "retry_after", None) or 0.0)
                if time.monotonic() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
        raise AssertionError("count() never ends")


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds to wait, or None if the header is missing or invalid. The header is a number of
    seconds or an HTTP date."""
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
