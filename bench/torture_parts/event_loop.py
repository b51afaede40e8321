"""An event loop with virtual time, in which a simulated process can be killed at any ``await``.

The loop never waits. When nothing is ready, it calls `on_idle`, which decides what happens next. The order
of all events is therefore determined by the scheduler's seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

START_TIME = 1_800_000_000.0


class ProcessState:
    """The state of a simulated process. Tasks inherit their process through their context."""

    is_alive = True


current_process: ContextVar[ProcessState | None] = ContextVar("current_process", default=None)


class SimulationLoop(asyncio.BaseEventLoop):
    """Runs only the callbacks of live processes.

    The tasks of a killed process are frozen, so not even its ``finally`` blocks run.
    """

    def __init__(self, on_idle: Callable[[float | None], bool]) -> None:
        """``on_idle`` is called with the seconds until the next timer, or None if there is none. It either
        makes something ready and returns True, or returns False to let this time pass."""
        super().__init__()
        self._selector = self  # pyright: ignore[reportAttributeAccessIssue] - the base class only calls `select`
        self._on_idle = on_idle
        self._now = 0.0
        self._frozen_handles: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        """References to all tasks, so that those of killed processes are not garbage-collected and closed."""
        self.set_exception_handler(lambda _, context: None)  # errors in killed processes are never retrieved

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        process = current_process.get() if context is None else context.get(current_process)
        if process is None or process.is_alive:
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._frozen_handles.append(handle)
        return handle

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **kwargs)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call the function immediately, because threads would make the order of events random."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - any error is passed to the caller
            future.set_exception(error)
        return future

    def select(self, timeout: float | None) -> list[Any]:
        if timeout == 0 or self._on_idle(timeout):
            return []
        if timeout is None:
            raise RuntimeError("deadlock: every task is waiting for another one")
        self._now += timeout
        return []

    def cancel_all(self) -> None:
        """Cancel the tasks of all processes, including killed ones, and run the loop until they end."""
        self._on_idle = _let_time_pass
        for _ in range(50):
            for handle in self._frozen_handles:
                if (process := handle._context.get(current_process)) is not None:  # pyright: ignore
                    process.is_alive = True
                super().call_soon(handle._callback, *handle._args, context=handle._context)  # pyright: ignore
            self._frozen_handles.clear()
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.sleep(1000))

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return


def _let_time_pass(timeout: float | None) -> bool:
    return False


@contextmanager
def virtual_time(loop: SimulationLoop, seed: int) -> Generator[None]:
    """Make the functions in `time` use the loop's time, and seed the global random generator.

    Both are restored afterwards.
    """
    clocks: dict[str, Callable[[], float]] = {
        "time": lambda: START_TIME + loop.time(),
        "monotonic": loop.time,
        "time_ns": lambda: int((START_TIME + loop.time()) * 1e9),
    }
    originals = {name: getattr(time, name) for name in clocks}
    random_state = random.getstate()
    random.seed(seed)
    for name, clock in clocks.items():
        setattr(time, name, clock)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(time, name, original)
        random.setstate(random_state)
