"""Helpers for concurrent coroutines, and for user code that may hang or ignore cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results in order. The first error cancels the rest."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait until they have ended. Their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result. A cancellation is raised only after the coroutine has finished."""
    task = asyncio.create_task(coroutine)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # otherwise asyncio would log the error as never retrieved
        raise cancellation
    return task.result()


async def map_concurrently(
    function: Callable[[S], Awaitable[T]], items: Iterable[S], max_concurrent: int | None = None
) -> list[T]:
    """Call ``function`` on each item and return the results in order. At most ``max_concurrent`` calls run at
    the same time; None means no limit. The first error cancels the other calls."""
    semaphore = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def call(item: S) -> T:
        async with semaphore:
            return await function(item)

    return await gather_or_cancel(call(item) for item in items)


async def run_in_daemon_thread(function: Callable[[], T], *, keep_thread: bool = False) -> T:
    """Run ``function`` in a new daemon thread and return its result. Cancellation abandons the thread. With
    ``keep_thread``, the thread stays alive until the process exits, even after ``function`` has returned."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # cancellation must not prevent the thread from setting a result

    def run() -> None:
        try:
            future.set_result(function())
        except StopIteration as error:  # an asyncio future cannot raise StopIteration
            future.set_exception(RuntimeError(f"the function raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - passed to the waiting coroutine
            future.set_exception(error)
        if keep_thread:
            threading.Event().wait()

    threading.Thread(target=run, name="instar-function", daemon=True).start()
    return await asyncio.wrap_future(future)


async def run_with_timeout(
    seconds: float,
    coroutine: Coroutine[Any, Any, T],
    *,
    grace_seconds: float,
    timeout_error: Exception,
    cancel_error: Exception,
) -> T:
    """Return the coroutine's result, or raise ``timeout_error`` after ``seconds``. On a timeout, or if the
    caller is cancelled, the coroutine is cancelled, and abandoned if it does not finish within
    ``grace_seconds``. ``cancel_error`` is raised if the coroutine cancels itself."""
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.cancelled():
            raise cancel_error
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace_seconds)
            if task.done() and not task.cancelled():
                task.exception()  # otherwise asyncio would log an error raised during cancellation
    raise timeout_error
