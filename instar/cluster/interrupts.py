"""Stop a command after Ctrl-C or SIGTERM, within a time limit even if something hangs."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM: 128 + SIGINT, as in shells."""
CLEANUP_TIMEOUT_SECONDS = 30.0
"""Seconds that the command has to stop its processes before they are killed."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handles SIGINT and SIGTERM. The first signal calls ``on_first_signal``, which by default cancels the
    current task. After a second signal or ``cleanup_seconds``, ``kill`` is called and the process exits."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.on_first_signal: Callable[[], object] = task.cancel
        self.kill: Callable[[], object] = lambda: None
        self.cleanup_seconds = CLEANUP_TIMEOUT_SECONDS
        self.is_stopping = False
        self._loop = asyncio.get_running_loop()

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            if signum == signal.SIGALRM:
                message = f"still running after {self.cleanup_seconds:g} s; killing all processes\n"
                os.write(2, message.encode())
            try:
                self.kill()
            finally:
                os._exit(EXIT_INTERRUPTED)
        self.is_stopping = True
        signal.signal(signal.SIGALRM, self.handle)
        signal.setitimer(signal.ITIMER_REAL, self.cleanup_seconds)
        self._loop.call_soon_threadsafe(lambda: self.on_first_signal())


@contextmanager
def handle_interrupts() -> Generator[Interrupts]:
    """Handle SIGINT and SIGTERM in the block, but only in the main thread, as Python requires. Raises
    KeyboardInterrupt if the block is cancelled after a signal. The command must exit after a signal: further
    signals are handled until it has exited, so that they cannot change its exit code."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    # Not `loop.add_signal_handler`, whose handlers are not called while the loop is blocked.
    previous = {number: signal.signal(number, interrupts.handle) for number in SIGNALS}
    try:
        yield interrupts
    except asyncio.CancelledError:
        if interrupts.is_stopping:
            raise KeyboardInterrupt from None
        raise
    finally:
        if interrupts.is_stopping:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        else:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _ignore_signals() -> None:
    """Ignore further signals after Ctrl-C. Python would otherwise restore their default action and be killed
    by them. Registered at import, so that it runs after the exit callbacks of modules that are imported
    later, such as Ray's. While those run, a further signal still ends the process."""
    for number in SIGNALS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Interrupts):
            signal.signal(number, signal.SIG_IGN)


atexit.register(_ignore_signals)
