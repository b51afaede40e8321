"""Folders that are created one time and kept, also if several processes need one at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def create_folder_once(folder: Path, create: Callable[[Path], None]) -> None:
    """Call ``create`` to fill ``folder`` unless it exists. Other processes wait meanwhile, and an incomplete
    folder is never used."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            return
        fresh = folder.parent / f".{folder.name}-{os.getpid()}"
        try:
            create(fresh)
            fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
