"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make ``path`` a folder filled by ``fill``; one that is there already is replaced. It is filled under
    another name, flushed to disk and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        fill(whole)
        for entry in [*whole.rglob("*"), whole]:
            _fsync(entry)
        if path.exists():
            path.rename(Path(scratch) / "replaced")
        whole.rename(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
