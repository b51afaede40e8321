"""Run coroutines in the background. Their exceptions are raised or logged, never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)


@asynccontextmanager
async def background_tasks(*coroutines: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """Run coroutines while the body runs, then cancel and await them. An exception in a coroutine cancels the
    body and is raised without an exception group, because a role's exit code depends on its type."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as group_error:
        first, *others = group_error.exceptions
        for error in others:
            logger.error("another error followed %r", first, exc_info=error)
        raise first from first.__cause__


async def run_until_first(*awaitables: Awaitable[object]) -> None:
    """Wait until one awaitable is done, cancel and await the others, and raise its error, if any."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await cancel_tasks(tasks)
        raise
    first = next((task for task in done if _get_error(task)), None) or next(iter(done))
    await cancel_tasks(task for task in tasks if task is not first)
    first.result()


async def cancel_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        log_error(task)


def log_error(task: asyncio.Future[Any]) -> None:
    if error := _get_error(task):
        logger.error("a background task failed", exc_info=error)


def _get_error(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


async def wait_any(*events: asyncio.Event) -> None:
    await run_until_first(*(event.wait() for event in events))


async def call_when_set(action: Callable[[], None], *events: asyncio.Event) -> None:
    await wait_any(*events)
    action()


async def wait_forever() -> None:
    await asyncio.Event().wait()
