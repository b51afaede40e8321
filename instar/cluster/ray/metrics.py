"""What roles on other nodes write to the run's metrics file there, brought into the file here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path


class MetricsMirror:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._there = set(self._path.read_bytes().splitlines()) if self._path.is_file() else set[bytes]()
        self._read: dict[str, int] = {}
        """Bytes of each host's file that are here."""
        self._locks: dict[str, asyncio.Lock] = {}

    async def fetch(self, host: str, read: Callable[[int], Awaitable[bytes]]) -> None:
        """Append the whole lines that are new. ``read`` gives what the host's file has beyond an offset."""
        # Two roles of one host write to the same file.
        async with self._locks.setdefault(host, asyncio.Lock()):
            offset = self._read.get(host, 0)
            data = await read(offset)
            whole = data[: data.rfind(b"\n") + 1]
            # What an earlier driver has brought here is there from the start.
            fresh = [line for line in whole.splitlines() if line not in self._there]
            if fresh:
                with self._path.open("ab") as file:
                    file.write(b"\n".join(fresh) + b"\n")
                self._there.update(fresh)
            self._read[host] = offset + len(whole)
