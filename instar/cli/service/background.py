"""Start the service in the background, and stop it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from instar.cli.service.home import Home
from instar.cli.service.lock import Launch, ServiceLock, ServiceState
from instar.cluster.base import KILL_TIMEOUT_SECONDS
from instar.cluster.interrupts import CLEANUP_TIMEOUT_SECONDS
from instar.errors import InstarError
from instar.umask import USER_UMASK, USER_UMASK_ENV

START_TIMEOUT_SECONDS = 700.0
"""How long `start` waits for the gateway. The service itself gives up after 600 seconds."""
STOP_TIMEOUT_SECONDS = CLEANUP_TIMEOUT_SECONDS + 5.0
"""How long the service has to exit. It kills its processes after `CLEANUP_TIMEOUT_SECONDS`."""
SHOWN_LOG_LINES = 15
POLL_INTERVAL_SECONDS = 0.1


def make_command(home: Home, launch: Launch) -> list[str]:
    """Return the command line that runs the service in the foreground."""
    command = [sys.executable, "-m", "instar.cli.main", "start", "--foreground"]
    if home.folder is not None:
        command.append(f"--home={home.folder}")
    command += [f"--set={override}" for override in launch.overrides]
    return command if launch.config is None else [*command, launch.config]


def start_in_background(home: Home, launch: Launch) -> tuple[ServiceState, bool]:
    """Return the state of the service once its gateway responds, and True if this call has started it, or
    False if another one did. On KeyboardInterrupt, the service that this call started is stopped."""
    home.create()
    with home.log_file.open("ab") as log:
        log_position = log.tell()
        process = subprocess.Popen(
            make_command(home, launch),
            cwd=launch.cwd,
            env={**os.environ, USER_UMASK_ENV: f"{USER_UMASK:o}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C and the end of the terminal must not reach the service
        )
    try:
        state = wait_until_ready(home, process, log_position)
    except BaseException:  # also after Ctrl-C, no half-started service may stay behind
        _terminate(process)
        raise
    return state, state.pid == process.pid


def wait_until_ready(
    home: Home, process: subprocess.Popen[bytes] | None = None, log_position: int = 0
) -> ServiceState:
    """Return the state of the service once its gateway responds. Raises InstarError if the service ends, with
    the lines that it wrote to the log after ``log_position``. ``process`` is the service if this process has
    started it; it ends early if another one is faster, which is then waited for."""
    lock = ServiceLock(home)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        has_exited = process is None or process.poll() is not None  # before the state, which is then final
        state = lock.read_running()
        if state is not None and state.url:
            return state
        if has_exited and state is None:
            raise InstarError(
                f"The service did not start:\n{_read_log_end(home.log_file, log_position)}\n"
                f"(log: {home.log_file})"
            )
        if time.monotonic() > deadline:
            raise InstarError(
                f"the service did not respond within {START_TIMEOUT_SECONDS:g} s; see {home.log_file}"
            )
        time.sleep(POLL_INTERVAL_SECONDS)


def _read_log_end(log_file: Path, position: int) -> str:
    with log_file.open("rb") as log:
        log.seek(position)
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-SHOWN_LOG_LINES:])


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILL_TIMEOUT_SECONDS)


def wait_until_stopped(home: Home, state: ServiceState) -> None:
    """Wait until a service that was told to exit has ended, and kill it if it does not exit in time."""
    lock = ServiceLock(home)
    if lock.wait_for_end(state.pid, STOP_TIMEOUT_SECONDS):
        return
    lock.kill(state.pid)
    if not lock.wait_for_end(state.pid, KILL_TIMEOUT_SECONDS):
        raise InstarError(f"the service (process {state.pid}) was killed but has not exited")
