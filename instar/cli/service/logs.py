"""Bound the size of log files, and show their last lines."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MAX_LOG_BYTES = 10 * 1024 * 1024
ROTATION_INTERVAL_SECONDS = 5.0
FOLLOW_INTERVAL_SECONDS = 0.2


def get_rotated_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def rotate(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the content of a log of more than ``max_bytes`` to a second file, which is replaced. The log is
    truncated and not renamed, because processes write to it without a logging handler that could reopen it.
    What they write between the copy and the truncation, a few microseconds, is lost."""
    if not path.is_file() or path.stat().st_size <= max_bytes:
        return
    scratch = path.with_name(f"{path.name}.partial")
    scratch.unlink(missing_ok=True)
    scratch.touch(mode=0o600)
    with path.open("rb") as source, scratch.open("wb") as target:
        shutil.copyfileobj(source, target)
        os.truncate(path, 0)
    scratch.replace(get_rotated_path(path))


async def rotate_repeatedly(list_logs: Callable[[], Iterable[Path]]) -> None:
    while True:
        for path in list_logs():
            await asyncio.to_thread(rotate, path)
        await asyncio.sleep(ROTATION_INTERVAL_SECONDS)


def read_last_lines(path: Path, count: int) -> tuple[str, int]:
    """Return the last lines of a log, and the position in the file up to which it was read. If the log was
    truncated, the lines include its earlier content."""
    lines: deque[bytes] = deque(maxlen=count)
    position = 0
    for file in (get_rotated_path(path), path):
        if file.is_file():
            with file.open("rb") as log:
                lines.extend(log)
                position = log.tell()
    return b"".join(lines).decode(errors="replace"), position


def follow(path: Path, position: int) -> Iterator[str]:
    """Yield text that is appended to the log after ``position``, forever. Start over when it is truncated."""
    while True:
        size = path.stat().st_size if path.is_file() else 0
        if size < position:
            position = 0
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                data = file.read(size - position)
            position += len(data)
            yield data.decode(errors="replace")
        time.sleep(FOLLOW_INTERVAL_SECONDS)
