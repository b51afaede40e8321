"""Start and stop the processes of a measurement, and read their resource usage."""

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

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class MeasurementError(Exception):
    """A program cannot be installed, started or measured. The message is shown in the results."""


@dataclass(frozen=True)
class Usage:
    cpu_s: float
    rss_mb: float


def read_usage(pid: int) -> Usage:
    """Return the CPU time so far and the memory of a process, including all its threads."""
    clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) does; /proc only counts ticks
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(time.clock_gettime(clock), pages * PAGE_SIZE / 2**20)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def start_process(
    command: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """Run the program in its own process group and kill the group on exit."""
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


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path, timeout: float = 120.0) -> None:
    """Wait until the URL responds with anything other than a server error."""
    deadline = time.monotonic() + timeout
    while True:
        if process.poll() is not None:
            raise MeasurementError(f"the process exited with code {process.returncode}: {read_log_tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise MeasurementError(f"no response within {timeout:.0f} s: {read_log_tail(log)}")
        time.sleep(0.1)


def read_log_tail(log: Path) -> str:
    """Return the last lines of a program's output, joined into one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-4:])[-300:] or "no output"
