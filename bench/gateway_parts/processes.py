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
    cpu_seconds: float
    rss_mb: float


def read_usage(pid: int) -> Usage:
    """Return the memory of a process, and the CPU time of all its threads since it started."""
    clock = (~pid << 3) | 2  # the formula of clock_getcpuclockid(3); /proc only counts ticks
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(time.clock_gettime(clock), pages * PAGE_SIZE / 2**20)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def start_process(
    command: Sequence[str | Path],
    log_path: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """Run the program in its own process group. On exit, terminate it and then kill the group.

    Append its output to the log, or only stderr if ``stdout`` is set.
    """
    with log_path.open("ab") as output:
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


def wait_until_up(
    process: subprocess.Popen[bytes], url: str, log_path: Path, timeout_seconds: float = 120.0
) -> None:
    """Wait until the URL responds with anything other than a server error.

    Raises MeasurementError if the process exits or the timeout expires.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        check_running(process, log_path)
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise MeasurementError(f"no response within {timeout_seconds:.0f} s: {read_log_tail(log_path)}")
        time.sleep(0.1)


def check_running(process: subprocess.Popen[bytes], log_path: Path, name: str = "the process") -> None:
    """Raise MeasurementError if the process has exited."""
    if process.poll() is not None:
        log = read_log_tail(log_path)
        raise MeasurementError(f"{name} exited with code {process.returncode}: {log}")


def read_log_tail(log_path: Path) -> str:
    """Return the last lines of a program's output, joined into one."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-4:])[-300:] or "no output"
