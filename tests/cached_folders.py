"""Create a folder once, even if several processes need it at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def create_folder_once(folder: Path, create: Callable[[Path], None]) -> None:
    """Create ``folder`` unless it exists. Other processes wait until it is complete.

    ``create`` receives a temporary path, which is then renamed to ``folder``.
    """
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
