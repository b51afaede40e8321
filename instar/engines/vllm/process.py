"""A vLLM server as a child process: started, watched over, started again when it dies."""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import instar
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.command import IDLE_SECONDS, VllmLaunch
from instar.errors import EngineError
from instar.subprocess_guard import guard_command

BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each start after the first, while they fail."""
FORGIVEN_AFTER = 120.0
"""Seconds of serving after which earlier failures are forgotten."""
CHECK_PERIOD = 5.0
CHECK_SECONDS = 20.0
MISSED_CHECKS = 3
"""Health checks in a row that a server may leave unanswered before it is ended."""
END_SECONDS = 20.0
TAIL_LINES = 20


class VllmProcess:
    """``up`` is awaited each time the server has come up, before it counts as ready; ``down`` is told when
    it is gone. The server listens on a loopback port, and takes a key that no file holds."""

    def __init__(
        self,
        launch: VllmLaunch,
        log: Path,
        *,
        up: Callable[[], Awaitable[None]],
        down: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._log = log
        self._up, self._down, self._say = up, down, say
        self._key = secrets.token_urlsafe(24)
        # Held, but not listened on, so that nobody else is given the port between two starts.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._port.getsockname()[1]}"
        self.client = VllmClient(url, self._key, idle_seconds=IDLE_SECONDS)
        self._package = tempfile.TemporaryDirectory(prefix="instar-vllm-")
        (Path(self._package.name) / "instar").symlink_to(Path(instar.__file__).parent)
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.failure: EngineError | None = None
        """Why it is not started any more."""

    async def start(self) -> None:
        """Until it serves for the first time. Raises EngineError with the end of its log where it cannot."""
        await self._spawn()
        await self._come_up()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._end()
        await self.client.close()
        self._port.close()
        self._package.cleanup()

    # --- one life of the server ----------------------------------------------------------------------

    async def _spawn(self) -> None:
        port = self._port.getsockname()[1]
        command = guard_command(self._launch.command(port))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                env=self._launch.environment(self._key, Path(self._package.name)),
                stdin=asyncio.subprocess.PIPE,  # the guard ends when this does
                stdout=log,
                stderr=log,
                start_new_session=True,  # the guard is to outlive the one who is killed with all its group
            )

    async def _come_up(self) -> None:
        assert self._process is not None
        seconds = self._launch.config.start_timeout
        deadline = time.monotonic() + seconds
        while not await self._healthy(timeout=5.0):
            if (code := self._process.returncode) is not None:
                raise EngineError(f"vLLM ended with exit code {code} before it served\n{self._tail()}")
            if time.monotonic() > deadline:
                await self._end()
                raise EngineError(f"vLLM did not serve within {seconds:g} s\n{self._tail()}")
            await asyncio.sleep(0.25)
        await self._up()

    async def _healthy(self, timeout: float) -> bool:
        try:
            await self.client.get("/health", timeout=timeout)
        except EngineError:
            return False
        return True

    async def _keep(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            why = await self._until_it_ends()
            self._down(why)
            await self._end()
            if time.monotonic() - began > FORGIVEN_AFTER:
                failures = 0
            if failures >= len(BACKOFF):
                self.failure = EngineError(f"{why}, and again after each restart\n{self._tail()}")
                return
            self._say(f"{why}; starting it again")
            await asyncio.sleep(BACKOFF[failures])
            failures += 1
            try:
                await self._spawn()
                await self._come_up()
            except (EngineError, OSError) as error:
                self._say(str(error).splitlines()[0])
                await self._end()

    async def _until_it_ends(self) -> str:
        """Why it counts as ended: its exit, or that it does not answer any more."""
        if self._process is None:
            return "vLLM did not come up"
        missed = 0
        while missed < MISSED_CHECKS:
            try:
                async with asyncio.timeout(CHECK_PERIOD):
                    code = await self._process.wait()
                return f"vLLM ended with exit code {code}"
            except TimeoutError:
                missed = 0 if await self._healthy(CHECK_SECONDS) else missed + 1
        return "vLLM does not answer"

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"(log: {self._log})", *lines])
