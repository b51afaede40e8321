"""Runs a command and ends it, with everything it started, when the one who asked for it is gone.

    python -I -S guard.py [--at-once] COMMAND...

The asker holds the other end of this process's standard input; however the asker ends, that end closes. What
the command starts may outlive it, or the asker: on Linux all of that becomes children of this process, which
ends them too. ``--at-once``: the command has no time to end by itself. This process ends as the command did.
Needs nothing but Python, and little of that: an agent is run by it in every session.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

GRACE = 5.0
"""Seconds that the command has to end by itself once it is asked to."""
NOT_STARTED = 127
SET_PDEATHSIG = 1
SET_DUMPABLE = 4
SET_CHILD_SUBREAPER = 36


def guarded(command: Sequence[str], *, at_once: bool = False) -> list[str]:
    """The command line that runs it so. Isolated: a folder that Python looks into may hold a `types.py`."""
    flags = ["--at-once"] if at_once else []
    return [sys.executable, "-I", "-S", __file__, *flags, *command]


def main(grace: float, command: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        # It ends with its asker, not before. Ignored by the system, they would be by the command too.
        signal.signal(number, _nothing)
    ended, ends = os.pipe()
    os.set_blocking(ends, False)
    signal.set_wakeup_fd(ends, warn_on_full_buffer=False)
    _prctl(SET_CHILD_SUBREAPER, 1)
    child = _start(command)
    status = _wait(child, [ended, sys.stdin.fileno()], None)
    if status is None and grace:
        os.kill(child, signal.SIGTERM)
        status = _wait(child, [ended], grace)
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    _end_descendants(child)
    _end_as(os.waitstatus_to_exitcode(status))


def _start(command: list[str]) -> int:
    asker = os.getpid()
    if child := os.fork():
        return child
    try:
        os.setsid()
        _prctl(SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != asker:
            os._exit(NOT_STARTED)  # it was killed before this one was to end with it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _wait(child: int, watched: list[int], seconds: float | None) -> int | None:
    """The child's status; None where it goes on after so many seconds, or the asker is gone. ``watched``:
    what tells that a child has ended, and what tells of the asker."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(watched, [], [], left)
        if ready != watched[:1]:
            return None
        os.read(ready[0], 4096)  # it may be another that has ended


def _end_descendants(child: int) -> None:
    """Those that are left are this process's own children by now, or become so as their parents end."""
    if sys.platform != "linux":
        _kill(-child)  # its group; what has left that is out of reach
        return
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        for pid in _children():
            _kill(pid)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.005)
        except ChildProcessError:
            return


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 - pathlib is slow to import
        return [int(pid) for pid in file.read().split()]


def _kill(pid: int) -> None:
    try:  # noqa: SIM105 - contextlib is slow to import
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, or is another user's by now


def _end_as(code: int) -> None:
    if code >= 0:
        sys.exit(code)
    _prctl(SET_DUMPABLE, 0)  # the command's own core is the one of interest
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _nothing(number: int, frame: object) -> None:
    pass


if __name__ == "__main__":
    at_once = sys.argv[1] == "--at-once"
    main(0.0 if at_once else GRACE, sys.argv[2 if at_once else 1 :])
