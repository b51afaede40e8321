"""The lock that the running service holds, and the description of the service that holds it.

The service holds `flock` on the lock file until its process has ended, however it ends, so what an earlier
process left behind never blocks a start. The state file is only read and written under a lock of its own,
under which the service also takes the first lock. A process id that is read while the first lock is held
therefore belongs to the service, and not to another process that got the same id later.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from instar.cli.service.home import Home
from instar.errors import InstarError


class Launch(msgspec.Struct, kw_only=True):
    """The options with which the service was started, and with which it is restarted."""

    config: str | None = None
    """Absolute path of the YAML file. Default: `config.yaml` in the home, if it exists."""
    overrides: list[str] = []
    cwd: str


class ServiceState(msgspec.Struct, kw_only=True):
    pid: int
    launch: Launch
    instar_version: str
    is_background: bool
    """True if the output goes to the service's log file, as `instar start` without `--foreground` does."""
    started_at: float
    run_dir: str
    url: str = ""
    """The gateway's URL, or an empty string until the gateway responds."""
    is_stopping: bool = False
    """True once the service was told to exit. A second signal would kill its processes."""


class ServiceLock:
    def __init__(self, home: Home) -> None:
        self._lock_file = home.lock_file
        self._state_file = home.state_file
        self._descriptor: int | None = None

    def acquire(self, state: ServiceState) -> bool:
        """Take the lock, which this process keeps until it ends. Return False if another process has it."""
        with _open_locked(self._state_file) as state_descriptor:
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._descriptor = descriptor
            _write_state(state_descriptor, state)
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def set_url(self, url: str) -> None:
        """Publish the URL of the gateway. The caller must hold the lock."""
        with _open_locked(self._state_file) as descriptor:
            state = _read_state(descriptor)
            assert state is not None
            state.url = url
            _write_state(descriptor, state)

    def read_running(self) -> ServiceState | None:
        """Return the state of the running service, or None if it does not run."""
        if not self._state_file.is_file():
            return None
        with _open_locked(self._state_file) as descriptor:
            return self._read_held(descriptor)

    def read_last(self) -> ServiceState | None:
        """Return the state of the service that was started last, or None if none ever was."""
        if not self._state_file.is_file():
            return None
        with _open_locked(self._state_file) as descriptor:
            return _read_state(descriptor)

    def request_stop(self) -> ServiceState | None:
        """Tell the running service to exit, and return its state, or None if it does not run. A service that
        is already stopping gets no second signal, because that would end it without cleaning up."""
        if not self._state_file.is_file():
            return None
        with _open_locked(self._state_file) as descriptor:
            state = self._read_held(descriptor)
            if state is not None and not state.is_stopping:
                os.kill(state.pid, signal.SIGTERM)
                state.is_stopping = True
                _write_state(descriptor, state)
        return state

    def kill(self, pid: int) -> None:
        """Kill the running service if it is the process ``pid``. Its roles exit when they notice."""
        with _open_locked(self._state_file) as descriptor:
            state = self._read_held(descriptor)
            if state is not None and state.pid == pid:
                os.kill(pid, signal.SIGKILL)

    def wait_for_end(self, pid: int, timeout: float) -> bool:
        """Wait until the service with this process id has ended. Return False after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (state := self.read_running()) is not None and state.pid == pid:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _read_held(self, state_descriptor: int) -> ServiceState | None:
        """Return the state if another process, or this one, holds the lock."""
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            state = _read_state(state_descriptor)
        finally:
            os.close(descriptor)
        if state is None:
            raise InstarError(
                f"the service is running, but another version of Instar wrote {self._state_file}; end the "
                f"process that has {self._lock_file} open"
            )
        return state


@contextmanager
def _open_locked(path: Path) -> Generator[int]:
    """Yield a descriptor of the file, which is locked. The lock is only ever held for a moment."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_state(descriptor: int) -> ServiceState | None:
    """Return the state, or None if there is none, or a crash interrupted its writer."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        return msgspec.json.decode(data, type=ServiceState)
    except msgspec.DecodeError:
        return None


def _write_state(descriptor: int, state: ServiceState) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(state), 0)
