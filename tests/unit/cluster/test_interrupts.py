"""Tests of the exit code of a command that receives further signals while it exits after Ctrl-C."""

from __future__ import annotations

import subprocess
import sys

import pytest

from instar.cluster.interrupts import EXIT_INTERRUPTED

COMMAND = """
import asyncio, atexit, os, signal, sys, time

SIGNAL = signal.{signal}
if "{moment}" == "finalization":
    atexit.register(os.kill, os.getpid(), SIGNAL)  # called last

from instar.cluster.interrupts import EXIT_INTERRUPTED, handle_interrupts

def hang():
    os.kill(os.getpid(), SIGNAL)
    time.sleep(60)

if "{moment}" == "exit callback":
    atexit.register(hang)

async def run():
    with handle_interrupts():
        os.kill(os.getpid(), SIGNAL)
        await asyncio.sleep(60)

try:
    asyncio.run(run())
except KeyboardInterrupt:
    if "{moment}" == "exception handler":
        os.kill(os.getpid(), SIGNAL)
    sys.exit(EXIT_INTERRUPTED)
"""


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", ["exception handler", "exit callback", "finalization"])
def test_further_signal_while_the_process_exits_keeps_the_exit_code(signal: str, moment: str) -> None:
    script = COMMAND.format(signal=signal, moment=moment)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stderr) == (EXIT_INTERRUPTED, "")
