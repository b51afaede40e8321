"""Tests of the exit code of a command that receives further signals while it exits after Ctrl-C."""

from __future__ import annotations

import subprocess
import sys

import pytest

from instar.cluster.interrupts import EXIT_INTERRUPTED

COMMAND = """
import asyncio, atexit, os, signal, sys
from instar.cluster.interrupts import EXIT_INTERRUPTED, handle_interrupts

SIGNAL = signal.{signal}

async def run():
    with handle_interrupts():
        os.kill(os.getpid(), SIGNAL)
        await asyncio.sleep(60)

if {is_finalizing}:
    atexit.register(os.kill, os.getpid(), SIGNAL)
try:
    asyncio.run(run())
except KeyboardInterrupt:
    if not {is_finalizing}:
        os.kill(os.getpid(), SIGNAL)
    sys.exit(EXIT_INTERRUPTED)
"""


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("is_finalizing", [False, True])
def test_further_signal_while_the_process_exits_keeps_the_exit_code(signal: str, is_finalizing: bool) -> None:
    script = COMMAND.format(signal=signal, is_finalizing=is_finalizing)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (EXIT_INTERRUPTED, "")
