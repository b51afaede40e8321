"""Tests for the folders of jobs whose owner was killed. Bubblewrap keeps these folders in memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from instar.rewards.sandbox.factory import create_sandbox
from tests.unit.rewards.sandboxes import find_sandbox_problem

OWNER_PROGRAM = """
import asyncio
from instar.rewards.sandbox.base import SandboxJob, SandboxLimits
from instar.rewards.sandbox.factory import create_sandbox

async def main():
    sandbox = await create_sandbox("landlock")
    await sandbox.run(SandboxJob(["sh", "-c", "echo > started; sleep 300"]), SandboxLimits(seconds=300))

asyncio.run(main())
"""


@pytest.mark.skipif(
    find_sandbox_problem("landlock") is not None, reason=str(find_sandbox_problem("landlock"))
)
def test_folders_of_a_killed_owner_are_removed_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", OWNER_PROGRAM]
    owners = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        while len(list(tmp_path.glob("instar-job-*/started"))) < 2:
            time.sleep(0.05)
        owners[0].kill()
        owners[0].wait()
        assert len(list(tmp_path.iterdir())) == 2
        asyncio.run(create_sandbox("landlock"))
        (kept,) = tmp_path.iterdir()
        assert (kept / "started").exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
    asyncio.run(create_sandbox("landlock"))
    assert list(tmp_path.iterdir()) == []
