"""Tests for the faults that the torture tests inject."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.torture.faults import HOOKS, Clock, FileSizeLimit

READ_CLOCK = "import time\nwhile input():\n    print(time.time(), time.time_ns() / 1e9, flush=True)"
WRITE_FILE = """
while path := input():
    try:
        with open(path, "w") as file:
            file.write("x")
        print("written", flush=True)
    except OSError as error:
        print(error, flush=True)
"""


def start_python(program: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(HOOKS), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def send_line(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_clock_jump_changes_the_time_of_a_running_process(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    with start_python(READ_CLOCK, **clock.env) as process:
        for jump, offset in ((0, 0), (-86_400, -86_400), (3600, -82_800)):
            clock.jump(jump)
            seconds, seconds_from_ns = map(float, send_line(process, "now").split())
            assert abs(seconds - time.time() - offset) < 60
            assert abs(seconds_from_ns - seconds) < 60
        process.kill()


def test_file_size_limit_fails_writes_between_fill_and_free(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    with start_python(WRITE_FILE) as process:
        limit = FileSizeLimit(lambda: [process.pid])
        assert send_line(process, file) == "written"
        limit.fill()
        assert "File too large" in send_line(process, file)
        limit.free()
        assert send_line(process, file) == "written"
        process.kill()
