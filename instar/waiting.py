"""Waiting for foreign code, which may neither end nor let itself be cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """The work's result, from a thread of its own. Cancelled, it leaves the thread behind, which keeps no
    process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # pyright: ignore[reportArgumentType] # there is one where nothing was raised
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except StopIteration as error:  # no future takes it
            failure = RuntimeError(f"it raised {error!r}")
        except BaseException as error:  # noqa: BLE001 - it is told to whoever waits
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="instar-foreign", daemon=True).start()
    return await done


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
