"""Folders that are created once and kept, even if several processes need one at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def create_folder_once(folder: Path, create: Callable[[Path], None]) -> None:
    """Call ``create`` to fill ``folder`` unless it exists. Other processes wait until it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            return
        temporary = folder.parent / f".{folder.name}-{os.getpid()}"
        try:
            create(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
