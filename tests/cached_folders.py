"""Folders that are made once and kept, though several processes may want one at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def create_folder_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have ``make`` fill ``folder``, unless it is there. Others that want it wait, and a
    half-made folder is never taken for a whole one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            return
        fresh = folder.parent / f".{folder.name}-{os.getpid()}"
        try:
            make(fresh)
            fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
