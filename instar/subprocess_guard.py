"""Runs a command, and kills all its processes when it exits or when the parent process exits.

    python -I -S subprocess_guard.py [--kill-immediately] COMMAND...

The standard input of this process is a pipe that closes when the parent exits. On Linux, processes that
outlive the command become children of this process, which kills them. With ``--kill-immediately``, no SIGTERM
is sent before SIGKILL. The guard exits with the command's status. It is started for every agent session, so
it imports only a few standard modules.
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

KILL_DELAY_SECONDS = 5.0
"""The time between SIGTERM and SIGKILL, and the time limit for killing the remaining processes."""
EXIT_NOT_STARTED = 127
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def guard_command(command: Sequence[str], *, kill_immediately: bool = False) -> list[str]:
    """Return the command line that runs ``command`` under the guard."""
    # -I excludes the script's folder from the search path, because it contains modules such as `types.py`.
    flags = ["--kill-immediately"] if kill_immediately else []
    return [sys.executable, "-I", "-S", __file__, *flags, *command]


def main(grace_seconds: float, command: list[str]) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        # Signals must not stop the guard. SIG_IGN cannot be used, because the command would inherit it.
        signal.signal(signum, lambda _signum, _frame: None)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = _start(command)
    status = _wait(child, [wakeup_read, sys.stdin.fileno()], None)
    if status is None and grace_seconds:
        os.kill(child, signal.SIGTERM)
        status = _wait(child, [wakeup_read], grace_seconds)
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
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(EXIT_NOT_STARTED)  # the guard died before PR_SET_PDEATHSIG took effect
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals
            signal.signal(signum, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(EXIT_NOT_STARTED)


def _wait(child: int, watched_fds: list[int], seconds: float | None) -> int | None:
    """Return the child's status, or None if it is still running after ``seconds`` or when the parent exits.
    ``watched_fds`` is the signal wakeup pipe, optionally followed by the pipe from the parent."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(watched_fds, [], [], remaining)
        if ready != watched_fds[:1]:
            return None
        os.read(ready[0], 4096)  # another child may have exited


def _kill_descendants(child: int) -> None:
    """Kill the remaining processes. They become children of this process when their parents exit."""
    if sys.platform != "linux":
        _kill(-child)  # the process group; processes that left the group are not found
        return
    deadline = time.monotonic() + KILL_DELAY_SECONDS
    while time.monotonic() < deadline:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 - pathlib is slow to import
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            _kill(pid)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.005)
        except ChildProcessError:
            return


def _kill(pid: int) -> None:
    try:  # noqa: SIM105 - contextlib is slow to import
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the process has exited, or belongs to another user


def _exit_like(code: int) -> None:
    if code >= 0:
        sys.exit(code)
    _prctl(PR_SET_DUMPABLE, 0)  # only the command should dump core
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    kill_immediately = sys.argv[1] == "--kill-immediately"
    main(0.0 if kill_immediately else KILL_DELAY_SECONDS, sys.argv[2 if kill_immediately else 1 :])
