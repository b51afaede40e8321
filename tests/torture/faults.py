"""Machine faults: full disks, clock jumps and suspended processes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path

from tests.torture.hooks.sitecustomize import CLOCK_ENV

HOOKS = Path(__file__).parent / "hooks"


class Clock:
    """Shifts the wall clock of every process started with ``env``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_seconds = 0.0
        path.write_bytes(struct.pack("d", 0.0))
        self.env = {CLOCK_ENV: str(path)}

    def jump(self, seconds: float) -> None:
        self._offset_seconds += seconds
        with self._path.open("r+b") as file:  # write in place, because the processes have mapped this file
            file.write(struct.pack("d", self._offset_seconds))


class Disk(ABC):
    """A disk that can be filled and freed."""

    @abstractmethod
    def fill(self) -> None:
        """Make all writes that need more space fail until `free` is called."""

    @abstractmethod
    def free(self) -> None: ...

    def remove(self) -> None:
        """Remove the disk and its contents."""
        return


class SmallDisk(Disk):
    """An in-memory file system, mounted on an existing folder. Requires root."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        options = f"size={megabytes}m,mode=755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "instar-torture", str(folder)], check=True)
        self._folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def remove(self) -> None:
        # Unmount lazily, because an exiting process may still have files open.
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)


class FileSizeLimit(Disk):
    """Simulates a full disk with RLIMIT_FSIZE, which does not require root."""

    def __init__(self, list_pids: Callable[[], Collection[int]]) -> None:
        self._list_pids = list_pids

    def fill(self) -> None:
        self._set_limit(0)

    def free(self) -> None:
        self._set_limit(None)

    def _set_limit(self, limit: int | None) -> None:
        for pid in self._list_pids():
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if limit is None else limit, hard))


def suspend_process(pid: int, seconds: float) -> None:
    """Suspend the process with SIGSTOP for ``seconds``, if it exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
