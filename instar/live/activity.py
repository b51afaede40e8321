"""A small shared file in which the gateway announces live requests, so that training can pause at once.

All times are from the monotonic clock, which all processes of a machine share, and which never jumps.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

ACTIVITY_FILE = "activity"
_REQUESTS = struct.Struct("=Qd")
"""The number of live requests in progress, and the time at which it last changed."""
_ALIVE_OFFSET, _ALIVE = _REQUESTS.size, struct.Struct("=d")
"""The time at which the gateway last ran."""
_SIZE = _REQUESTS.size + _ALIVE.size
HEARTBEAT_SECONDS = 1.0
EXPIRY_SECONDS = 10.0
"""A gateway that has not run for this long has exited or hangs, and answers no requests."""


def _map_file(path: Path, access: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < _SIZE:
            os.ftruncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE, access=access)
    finally:
        os.close(descriptor)


class ActivityRecorder:
    """Announces the live requests of the gateway. Another gateway process continues in the same file."""

    def __init__(self, path: Path) -> None:
        self._map = _map_file(path, mmap.ACCESS_WRITE)
        self._count = 0
        # Whether a request ended just before this process started is not known, so assume that one did.
        self._write()
        _ALIVE.pack_into(self._map, _ALIVE_OFFSET, time.monotonic())

    @contextmanager
    def track_request(self) -> Generator[None]:
        self._count += 1
        self._write()
        try:
            yield
        finally:
            self._count -= 1
            self._write()

    def _write(self) -> None:
        _REQUESTS.pack_into(self._map, 0, self._count, time.monotonic())

    async def run(self) -> None:
        """Announce that the gateway is running, until cancelled."""
        while True:
            _ALIVE.pack_into(self._map, _ALIVE_OFFSET, time.monotonic())
            await asyncio.sleep(HEARTBEAT_SECONDS)


class ActivityReader:
    """Reads in under a microsecond what an `ActivityRecorder` of this machine announces."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._map = _map_file(path, mmap.ACCESS_READ)
        self._clock = clock

    def read(self) -> tuple[bool, float]:
        """Return True if a live request is in progress, and the seconds since the last one ended."""
        count, changed_at = _REQUESTS.unpack_from(self._map, 0)
        now = self._clock()
        if count:
            (alive_at,) = _ALIVE.unpack_from(self._map, _ALIVE_OFFSET)
            if 0 <= now - alive_at < EXPIRY_SECONDS:
                return True, 0.0
        # The monotonic clock starts again when the machine does. The file may be older.
        return False, max(0.0, now - changed_at)
