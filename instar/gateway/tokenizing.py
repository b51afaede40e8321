"""Tokenize large prompts in threads, so that they do not delay other requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from instar.config import GatewayConfig
from instar.gateway.base import ApiError

T = TypeVar("T")
MIN_LARGE_PROMPT = 32 * 1024
"""Prompts of at least this size are tokenized in a thread; for smaller ones, a thread would be slower. The
size is the number of characters to tokenize or, if unknown, the size of the request body in bytes."""
_MAX_THREADS = 2


class TokenizerPool:
    def __init__(self, config: GatewayConfig) -> None:
        self._timeout = config.request_timeout
        self._max_per_key = max(1, config.max_in_flight // 4)
        self._executor = ThreadPoolExecutor(_MAX_THREADS, "tokenizer")
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pending: Counter[str] = Counter()

    async def run(self, key: str, function: Callable[[], T]) -> T:
        """Run the function in a thread. ``key`` is the caller's API key; each key uses one thread at a time.
        Raise ApiError if too many of the key's prompts are waiting (429), or after the timeout (504)."""
        if self._pending[key] >= self._max_per_key:
            message = f"{self._max_per_key} large prompts from this API key are already waiting; retry later."
            raise ApiError(429, message, code="too_many_requests", retry_after=1)
        self._pending[key] += 1
        try:
            async with asyncio.timeout(self._timeout):
                semaphore = self._semaphores.setdefault(key, asyncio.Semaphore())
                await semaphore.acquire()
                future = self._executor.submit(function)
                # A thread cannot be cancelled, so the key's semaphore is held until the thread ends.
                future.add_done_callback(partial(_release, asyncio.get_running_loop(), semaphore))
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            message = f"The prompt was not tokenized within {self._timeout:g} seconds; send a shorter prompt."
            raise ApiError(504, message, code="timeout") from error
        finally:
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]


def _release(loop: asyncio.AbstractEventLoop, semaphore: asyncio.Semaphore, _: Future[Any]) -> None:
    with suppress(RuntimeError):  # The loop may be closed.
        loop.call_soon_threadsafe(semaphore.release)
