"""Runs calls concurrently, and user code that may neither return nor react to cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def map_concurrently(
    function: Callable[[S], Awaitable[T]], items: Iterable[S], max_concurrent: int | None = None
) -> list[T]:
    """Return the result of ``function`` for each item. At most ``max_concurrent`` calls run at the same time.
    The first error cancels the other calls."""
    slots = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def call(item: S) -> T:
        async with slots:
            return await function(item)

    tasks = [asyncio.ensure_future(call(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work``, run in a new daemon thread. On cancellation the thread is abandoned; it
    does not keep the process alive."""
    loop = asyncio.get_running_loop()
    result_future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if result_future.cancelled():
            return
        if error is None:
            result_future.set_result(result)  # pyright: ignore[reportArgumentType] # only None after an error
        else:
            result_future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except StopIteration as error:  # a future cannot hold it
            failure = RuntimeError(f"the function raised {error!r}")
        except BaseException as error:  # noqa: BLE001 - passed to the waiting coroutine
            failure = error
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="instar-foreign", daemon=True).start()
    return await result_future


async def run_with_deadline(
    seconds: float,
    coroutine: Coroutine[Any, Any, T],
    *,
    grace: float,
    on_timeout: Exception,
    on_cancel: Exception,
) -> T:
    """Return the coroutine's result, or raise ``on_timeout`` after ``seconds``.

    On timeout the coroutine is cancelled, and abandoned if it has not ended ``grace`` seconds later.
    ``on_cancel`` is raised if it cancelled itself.
    """
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.cancelled():
            raise on_cancel
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace)
            if task.done() and not task.cancelled():
                task.exception()  # mark it as retrieved; errors raised during cancellation are ignored
    raise on_timeout
