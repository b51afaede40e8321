"""Programs that a measurement starts: waiting for them, ending them, and what they cost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


class DidNotStart(Exception):
    """A program of the measurement could not be installed or started; the reason is for the table."""


@dataclass(frozen=True)
class Usage:
    cpu_s: float
    rss_mb: float


def usage(pid: int) -> Usage:
    """CPU time so far and memory of one process, its threads included."""
    clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) makes it: to the nanosecond, where /proc has ticks
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(time.clock_gettime(clock), pages * PAGE / 2**20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """The program, in a process group of its own that is ended on leaving."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output if stdout is None else stdout,
            stderr=output,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()


def until_up(process: subprocess.Popen[bytes], url: str, log: Path, timeout: float = 120.0) -> None:
    """Wait until the address answers with anything but an error of the server."""
    deadline = time.monotonic() + timeout
    while True:
        if process.poll() is not None:
            raise DidNotStart(f"ended with exit code {process.returncode}: {last_words(log)}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise DidNotStart(f"did not answer within {timeout:.0f} s: {last_words(log)}")
        time.sleep(0.1)


def last_words(log: Path) -> str:
    """The end of what a program said, on one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-4:])[-300:] or "no output"
