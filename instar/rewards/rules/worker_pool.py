"""A few worker processes that check answers, each ended and replaced when one takes too long."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from instar.errors import ConfigError, ScoreError
from instar.models import usable_cores
from instar.types import Json

PROGRAM = Path(__file__).with_name("check_worker.py")
START = 120.0
"""Seconds for a worker to import what it needs."""
MOST = 4
LONGEST = 2**20
"""Bytes of a line that a worker says."""
KEPT = ("PATH", "HOME", "PYTHONPATH", "LANG")
"""What of our environment a worker is given; a key is not in it."""


class CheckWorkerPool:
    """``ask`` may be called many times at once, best by those who hold one of ``turns``. ``setup`` is what a
    check is made with. One that evaluates answers must be ``sealed``: where no process can shut itself in, it
    is begun in a sandbox."""

    def __init__(self, check: str, setup: Json | None = None, *, requires_sandbox: bool = False) -> None:
        self.check_name = check
        self.setup = json.dumps(setup or {})
        self.requires_sandbox = requires_sandbox
        self.command_prefix: list[str] = []
        self.idle_workers: list[asyncio.subprocess.Process] = []
        self.concurrency_limit = asyncio.Semaphore(min(MOST, usable_cores()))

    async def start(self) -> None:
        """Raises ConfigError where a package is missing, or a sandbox."""
        self.idle_workers.append(await self._spawn())

    async def run_check(self, seconds: float, **asked: Any) -> dict[str, Any]:
        """The answer; ``ok`` is False, with the reason, where it took longer than so many seconds."""
        # One that died may have been killed by somebody else; two were by what they were asked.
        answer = await self._ask(seconds, asked) or await self._ask(seconds, asked)
        if answer is None:
            return {"ok": False, "reason": "the check broke its process, twice"}
        if "error" in answer:
            raise ScoreError(answer["error"])
        return answer

    async def _ask(self, seconds: float, asked: dict[str, Any]) -> dict[str, Any] | None:
        """None where the worker died."""
        worker = self.idle_workers.pop() if self.idle_workers else await self._spawn()
        answer = None
        try:
            answer = await self._exchange(worker, seconds, asked)
        except TimeoutError:
            return {"ok": False, "reason": f"the check took longer than {seconds:g} s"}
        finally:
            if answer is None:
                await asyncio.shield(_end(worker))
            else:
                self.idle_workers.append(worker)
        return answer

    async def close(self) -> None:
        while self.idle_workers:
            await _end(self.idle_workers.pop())

    async def _exchange(
        self, worker: asyncio.subprocess.Process, seconds: float, asked: dict[str, Any]
    ) -> dict[str, Any] | None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        async with asyncio.timeout(seconds):
            try:
                worker.stdin.write(json.dumps({**asked, "seconds": seconds}).encode() + b"\n")
                await worker.stdin.drain()
                line = await worker.stdout.readline()
            except ConnectionError:
                line = b""
        return json.loads(line) if line else None

    async def _spawn(self) -> asyncio.subprocess.Process:
        worker, said = await self._begin()
        if "ready" in said and self.requires_sandbox and not said["confined"] and not self.command_prefix:
            await _end(worker)
            self.command_prefix = _sandbox()
            worker, said = await self._begin()
        if "ready" in said:
            return worker
        await _end(worker)
        if missing := said.get("missing"):
            raise ConfigError(f"reward.type: {self.check_name} needs {missing}: pip install 'instar[rules]'")
        raise ScoreError(f"the process that checks {self.check_name} did not start", retryable=True)

    async def _begin(self) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        """A process, and what it says first."""
        worker = await asyncio.create_subprocess_exec(
            *(*self.command_prefix, sys.executable, "-P", str(PROGRAM), self.check_name, self.setup),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LONGEST,
            env={name: os.environ[name] for name in KEPT if name in os.environ},
        )
        assert worker.stdout is not None
        try:
            return worker, json.loads(await asyncio.wait_for(worker.stdout.readline(), START) or "{}")
        except BaseException:
            await asyncio.shield(_end(worker))
            raise


def _sandbox() -> list[str]:
    """What the process is to be begun with: nothing can be written there, and nobody reached."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "tasks.sandbox: these tasks' scorers evaluate what a model wrote, and there is no sandbox for it "
            "here: install bubblewrap, or use Linux 6.2 or newer with Landlock. `sandbox: false` does without"
        )
    seen = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--setenv", "TMPDIR", "/dev/shm")
    return [program, *seen, "--unshare-all", "--die-with-parent"]


async def _end(worker: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        worker.kill()
    await worker.wait()
    assert worker.stdin is not None
    worker.stdin.close()
