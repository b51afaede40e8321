"""Base class for backends that run all calls in one thread, in order."""

from __future__ import annotations

import asyncio
import functools
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

from instar.backends.base import Backend
from instar.errors import BackendError

B = TypeVar("B", bound="ThreadedBackend")
P = ParamSpec("P")
T = TypeVar("T")


def do_nothing() -> None: ...


class ThreadedBackend(Backend):
    def __init__(self, thread_name: str) -> None:
        self._is_closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._pause: Callable[[], None] = do_nothing
        """Blocks while training must pause."""

    def set_pause(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._pool, self._release)
        self._pool.shutdown(wait=True)

    async def _run(self, function: Callable[[], T]) -> T:
        if self._is_closed:
            raise BackendError("the backend is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    @abstractmethod
    def _release(self) -> None: ...


def in_thread(
    method: Callable[Concatenate[B, P], T],
) -> Callable[Concatenate[B, P], CoroutineType[Any, Any, T]]:
    """Turn a blocking method into a coroutine that runs the method in the backend's thread."""

    @functools.wraps(method)
    async def run(self: B, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(lambda: method(self, *args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    return run
