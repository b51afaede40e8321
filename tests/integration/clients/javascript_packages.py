"""Install the npm packages and the JavaScript programs of the clients under ``.cache/clients``."""

from __future__ import annotations

import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from tests.cached_folders import create_folder_once
from tests.integration.clients.environment import CACHE, HERE

SOURCES = HERE / "javascript"


def install_packages() -> Path:
    """Install the npm packages if necessary, and return a folder with them and the programs."""
    files = sorted(SOURCES.iterdir())
    digest = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def install(folder: Path) -> None:
        shutil.copytree(SOURCES, folder)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)

    folder = CACHE / f"javascript-{digest[:12]}"
    create_folder_once(folder, install)
    return folder
