"""Runs a command and kills it, with every process it started, when the parent process is gone.

    python -I -S subprocess_guard.py [--kill-immediately] COMMAND...

The parent holds the other end of this process's standard input, which closes however the parent ends.
Processes that the command starts may outlive it; on Linux they become children of this process, which kills
them too.
``--kill-immediately`` gives the command no time to end by itself. The exit status is the command's.
Imports only a few standard modules, because every agent session starts through this script.
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
"""Seconds between SIGTERM and SIGKILL."""
NOT_STARTED = 127
SET_PDEATHSIG = 1
SET_DUMPABLE = 4
SET_CHILD_SUBREAPER = 36


def guard_command(command: Sequence[str], *, kill_immediately: bool = False) -> list[str]:
    """Return the command line that runs ``command`` under the guard."""
    # -I: without it Python would search folders that may contain a module such as `types.py`.
    flags = ["--kill-immediately"] if kill_immediately else []
    return [sys.executable, "-I", "-S", __file__, *flags, *command]


def main(grace: float, command: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        # The guard ends with its parent. A handler, not SIG_IGN: the command would inherit ignored signals.
        signal.signal(number, _ignore)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    _prctl(SET_CHILD_SUBREAPER, 1)
    child = _start(command)
    status = _wait(child, [wakeup_read, sys.stdin.fileno()], None)
    if status is None and grace:
        os.kill(child, signal.SIGTERM)
        status = _wait(child, [wakeup_read], grace)
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    _kill_descendants(child)
    _exit_like(os.waitstatus_to_exitcode(status))


def _start(command: list[str]) -> int:
    guard = os.getpid()
    if child := os.fork():
        return child
    try:
        os.setsid()
        _prctl(SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(NOT_STARTED)  # the guard died before PR_SET_PDEATHSIG took effect
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _wait(child: int, watched: list[int], seconds: float | None) -> int | None:
    """Return the child's status, or None if it still runs after ``seconds`` or the parent is gone.

    ``watched``: the file descriptor that signals an ended child, then the one that closes with the parent.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(watched, [], [], left)
        if ready != watched[:1]:
            return None
        os.read(ready[0], 4096)  # another child may have ended


def _kill_descendants(child: int) -> None:
    """Kill the remaining processes: they are this process's children, or become so when their parents end."""
    if sys.platform != "linux":
        _kill(-child)  # its process group; processes that left the group cannot be reached
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
        pass  # it has ended, or now belongs to another user


def _exit_like(code: int) -> None:
    if code >= 0:
        sys.exit(code)
    _prctl(SET_DUMPABLE, 0)  # only the command should dump core
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _ignore(number: int, frame: object) -> None:
    pass


if __name__ == "__main__":
    kill_immediately = sys.argv[1] == "--kill-immediately"
    main(0.0 if kill_immediately else GRACE, sys.argv[2 if kill_immediately else 1 :])
