"""Children that use a store (`child`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def command(mode: str, where: Path | str, name: str) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.child_process", mode, str(where), name]


def start(mode: str, where: Path | str, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(mode, where, name), cwd=ROOT, stdout=subprocess.PIPE, text=True)


def run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
