"""Copies the lines that roles on other nodes append to their metrics file into the file of this node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path


class MetricsMirror:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._lines = set(self._path.read_bytes().splitlines()) if self._path.is_file() else set[bytes]()
        self._read: dict[str, int] = {}
        """Number of bytes copied from the file of each host."""
        self._locks: dict[str, asyncio.Lock] = {}

    async def fetch(self, host: str, read: Callable[[int], Awaitable[bytes]]) -> None:
        """Append new complete lines to the file. ``read`` returns the host's file after an offset."""
        # Two roles on one host write to the same file.
        async with self._locks.setdefault(host, asyncio.Lock()):
            offset = self._read.get(host, 0)
            data = await read(offset)
            complete_lines = data[: data.rfind(b"\n") + 1]
            # The file may already contain lines that an earlier driver copied.
            fresh = [line for line in complete_lines.splitlines() if line not in self._lines]
            if fresh:
                with self._path.open("ab") as file:
                    file.write(b"\n".join(fresh) + b"\n")
                self._lines.update(fresh)
            self._read[host] = offset + len(complete_lines)
