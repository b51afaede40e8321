"""A pool of worker processes that check answers. Workers that exceed the time limit are replaced."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from instar.async_utils import run_to_completion
from instar.errors import ConfigError, ScoreError
from instar.models import usable_cores
from instar.types import Json

WORKER_SCRIPT = Path(__file__).with_name("check_worker.py")
START_TIMEOUT_SECONDS = 120.0
MAX_WORKERS = 4
MIN_WALL_SECONDS = 60.0
"""The time after which a check that uses little CPU time is stopped. It is long, so that correct answers do
not fail on a busy machine."""
CPU_LIMIT_EXIT_CODES = (-signal.SIGPROF, 128 + signal.SIGPROF)
"""The exit codes of a worker that used up the CPU time of a check, without and with bubblewrap."""
MAX_LINE_BYTES = 2**20
ENVIRONMENT_VARIABLES = ("PATH", "HOME", "PYTHONPATH", "LANG")
"""The environment variables that are passed to workers. None of them contains a key."""


class CheckWorkerPool:
    """Runs one type of check in worker processes. Callers limit concurrent checks with ``concurrency_limit``.
    If ``requires_sandbox`` is True, workers that cannot sandbox themselves are started in bubblewrap."""

    def __init__(
        self, check_name: str, check_args: Json | None = None, *, requires_sandbox: bool = False
    ) -> None:
        self.check_name = check_name
        self.check_args = json.dumps(check_args or {})
        self.requires_sandbox = requires_sandbox
        self.min_wall_seconds = MIN_WALL_SECONDS
        self.command_prefix: list[str] = []
        self.idle_workers: list[asyncio.subprocess.Process] = []
        self.concurrency_limit = asyncio.Semaphore(min(MAX_WORKERS, usable_cores()))

    async def start(self) -> None:
        """Start the first worker. Raises ConfigError if a package or the required sandbox is missing."""
        self.idle_workers.append(await self._spawn())

    async def run_check(self, seconds: float, **request: Any) -> dict[str, Any]:
        """Return the worker's result. ``ok`` is False if the check takes more than ``seconds`` of CPU time or
        crashes two workers. Raises ScoreError if the task's data, such as a schema, is invalid."""
        # The first worker may die for a different reason. If two workers die, the request must be the cause.
        result = await self._try_check(seconds, request) or await self._try_check(seconds, request)
        if result is None:
            return {"ok": False, "reason": "the check crashed its process twice"}
        if "error" in result:
            raise ScoreError(result["error"])
        return result

    async def _try_check(self, seconds: float, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the worker's result, or None if the worker died."""
        worker = self.idle_workers.pop() if self.idle_workers else await self._spawn()
        assert worker.stdin is not None
        assert worker.stdout is not None
        result = None
        wall_seconds = max(self.min_wall_seconds, 2 * seconds)
        try:
            async with asyncio.timeout(wall_seconds):
                with suppress(ConnectionError):
                    limits = {"cpu_seconds": seconds, "wall_seconds": wall_seconds}
                    worker.stdin.write(json.dumps({**request, **limits}).encode() + b"\n")
                    await worker.stdin.drain()
                    line = await worker.stdout.readline()
                    result = json.loads(line) if line else None
                    if result is None and await worker.wait() in CPU_LIMIT_EXIT_CODES:
                        return {"ok": False, "reason": f"the check took more than {seconds:g} s of CPU time"}
        except TimeoutError:
            return {"ok": False, "reason": f"the check took longer than {wall_seconds:g} s"}
        finally:
            if result is None:
                await run_to_completion(_kill(worker))
            else:
                self.idle_workers.append(worker)
        return result

    async def close(self) -> None:
        while self.idle_workers:
            await _kill(self.idle_workers.pop())

    async def _spawn(self) -> asyncio.subprocess.Process:
        worker, status = await self._start_process()
        is_unsandboxed = "ready" in status and not status["sandboxed"] and not self.command_prefix
        if self.requires_sandbox and is_unsandboxed:
            await _kill(worker)
            self.command_prefix = build_bubblewrap_command()
            worker, status = await self._start_process()
        if "ready" in status:
            return worker
        await _kill(worker)
        if missing := status.get("missing"):
            raise ConfigError(
                f"{self.check_name} checks require {missing}; run `pip install 'instar[rules,tasks]'`"
            )
        raise ScoreError(f"the worker process for {self.check_name} checks did not start", retryable=True)

    async def _start_process(self) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        script = (sys.executable, "-P", str(WORKER_SCRIPT), self.check_name, self.check_args)
        worker = await asyncio.create_subprocess_exec(
            *(*self.command_prefix, *script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE_BYTES,
            env={name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ},
        )
        assert worker.stdout is not None
        try:
            line = await asyncio.wait_for(worker.stdout.readline(), START_TIMEOUT_SECONDS)
            return worker, json.loads(line or "{}")
        except BaseException:  # including cancellation: no process may be left running
            await run_to_completion(_kill(worker))
            raise


def build_bubblewrap_command() -> list[str]:
    """Return a command prefix that blocks writes and the network. Raises ConfigError if bwrap is missing."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "tasks.sandbox: the scorers of these tasks evaluate text from the model, but no sandbox is "
            "available; install bubblewrap, use Linux 6.2 or newer with Landlock, or set `sandbox: false` to "
            "accept the risk"
        )
    mounts = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--setenv", "TMPDIR", "/dev/shm")
    return [program, *mounts, "--unshare-all", "--die-with-parent"]


async def _kill(worker: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        worker.kill()
    await worker.wait()
    assert worker.stdin is not None
    worker.stdin.close()
