"""Runs a command and ends it, with everything it started, when the one who asked for it is gone.

    python guard.py COMMAND...

The asker holds the other end of this process's standard input; however the asker ends, that end closes. vLLM
starts processes of its own, which outlive a killed parent: they become children of this process, which
ends them too. Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE = 5.0
"""Seconds that the command has to end by itself once it is asked to."""
SET_PDEATHSIG = 1
SET_CHILD_SUBREAPER = 36


def main() -> int:
    prctl = ctypes.CDLL(None).prctl
    prctl(SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGKILL),
    )
    ended = os.pidfd_open(child.pid)
    try:
        select.select([ended, sys.stdin.fileno()], [], [])
        if child.poll() is None:
            child.terminate()
            select.select([ended], [], [], GRACE)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        _end_descendants()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_descendants() -> None:
    """Those that are left are this process's own children by now, or become so as their parents end."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _nothing(number: int, frame: object) -> None:
    pass


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        # It ends with its asker, not before. Ignored by the system, they would be by the command too.
        signal.signal(number, _nothing)
    sys.exit(main())
