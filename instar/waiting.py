"""Waiting for foreign code, which may neither end nor let itself be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(
    seconds: float, work: Coroutine[Any, Any, T], *, grace: float, late: Exception, cancelled: Exception
) -> T:
    """The work's result. Raises ``late`` after so many seconds: the work is cancelled, and left behind where
    it has not ended ``grace`` seconds later; and ``cancelled`` where it cancelled itself."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.cancelled():
            raise cancelled
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved: what it raised while being cancelled is of no interest
    raise late
