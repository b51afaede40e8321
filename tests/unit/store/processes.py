"""Start, kill and wait for processes that run `child_process`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def build_command(mode: str, location: Path | str, name: str) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.child_process", mode, str(location), name]


def start_child(mode: str, location: Path | str, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(build_command(mode, location, name), cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kill_child(child: subprocess.Popen[str]) -> list[str]:
    """Kill the process and return the remaining complete lines of its output."""
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    assert child.stdout is not None
    with child.stdout:  # `communicate` would not return the lines that `readline` has read ahead
        return [line.strip() for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]


def run_command(arguments: list[str]) -> str:
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout
