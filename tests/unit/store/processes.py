"""Helpers to start child processes that use a store (`child_process`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def command(mode: str, location: Path | str, name: str) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.child_process", mode, str(location), name]


def start(mode: str, location: Path | str, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(mode, location, name), cwd=ROOT, stdout=subprocess.PIPE, text=True)


def run(arguments: list[str]) -> str:
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout
