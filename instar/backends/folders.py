"""Write folders atomically: even after a crash, a folder is either complete or absent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Create or replace ``path``: ``fill`` writes to a temporary folder, which is flushed and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        complete = Path(scratch) / "complete"
        complete.mkdir()
        fill(complete)
        for entry in [*complete.rglob("*"), complete]:
            flush_to_disk(entry)
        if path.exists():
            path.rename(Path(scratch) / "replaced")
        complete.rename(path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
