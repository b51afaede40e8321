"""A vLLM server that runs as a child process, or an external server."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import instar
from instar.async_utils import cancel_and_wait
from instar.config import VllmEngineConfig
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.command import STREAM_KEEP_ALIVE, VllmLaunch
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.subprocess_guard import guard_command

RESTART_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""The delays in seconds before consecutive restarts. After the last one, the server stays down. If the server
has run for STABLE_SECONDS, the delays start over."""
STABLE_SECONDS = 120.0
PROCESS_CHECK_INTERVAL_SECONDS = 5.0
HEALTH_CHECK_TIMEOUT_SECONDS = 20.0
MAX_MISSED_CHECKS = 3
"""The server is restarted after this many consecutive failed health checks."""
STOP_TIMEOUT_SECONDS = 20.0
LOG_TAIL_LINES = 20
CHECK_INTERVAL_SECONDS = 2.0
"""The interval between health checks of an external server."""
START_TIME_METRIC = "process_start_time_seconds "


@dataclass(frozen=True, slots=True)
class ServerCallbacks:
    """Callbacks for server events. ``on_ready`` is awaited each time the server becomes ready. ``on_down`` is
    called with the reason each time the server exits or stops responding. ``report`` writes a log line."""

    on_ready: Callable[[], Awaitable[None]]
    on_down: Callable[[str], None]
    report: Callable[[str], None]


class VllmProcess:
    """Runs a vLLM server as a child process and restarts it when it exits or stops responding. The server
    listens on a loopback port and requires a key that is not written to any file."""

    def __init__(
        self,
        launch: VllmLaunch,
        log_path: Path,
        callbacks: ServerCallbacks,
        *,
        restart_delays: Sequence[float] = RESTART_DELAYS,
    ) -> None:
        self._launch = launch
        self._log_path = log_path
        self._callbacks = callbacks
        self._restart_delays = restart_delays
        self._key = secrets.token_urlsafe(24)
        # The socket reserves the port between restarts. It is bound but does not listen.
        self._port_socket = socket.socket()
        self._port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._port_socket.getsockname()[1]}"
        self.client = VllmClient(url, self._key, stream_keep_alive=STREAM_KEEP_ALIVE)
        self._package_folder = tempfile.TemporaryDirectory(prefix="instar-vllm-")
        (Path(self._package_folder.name) / "instar").symlink_to(Path(instar.__file__).parent)
        self._process: asyncio.subprocess.Process | None = None
        self._restart_task: asyncio.Task[None] | None = None
        self.failure: EngineError | None = None
        """The error after which the server is no longer restarted, or None."""

    async def start(self) -> None:
        """Start the server. Raises EngineError with the end of its log if it does not become ready."""
        await self._start_server()
        self._restart_task = asyncio.create_task(self._keep_running())

    async def close(self) -> None:
        if self._restart_task is not None:
            await cancel_and_wait(self._restart_task)
        await self._stop()
        await self.client.close()
        self._port_socket.close()
        self._package_folder.cleanup()

    async def _start_server(self) -> None:
        command = guard_command(self._launch.build_command(self._port_socket.getsockname()[1]))
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *command,
                env=self._launch.build_environment(self._key, Path(self._package_folder.name)),
                stdin=asyncio.subprocess.PIPE,  # the guard exits when this pipe closes
                stdout=log,
                stderr=log,
                start_new_session=True,  # the guard must survive a signal to this process's group
            )
        seconds = self._launch.config.start_timeout
        deadline = time.monotonic() + seconds
        while await self.client.get_health_error(timeout=5.0) is not None:
            if (code := process.returncode) is not None:
                raise EngineError(f"vLLM exited with code {code} during startup.\n{self._read_log_tail()}")
            if time.monotonic() > deadline:
                await self._stop()
                raise EngineError(f"vLLM did not start within {seconds:g} s.\n{self._read_log_tail()}")
            await asyncio.sleep(0.25)
        await self._callbacks.on_ready()

    async def _keep_running(self) -> None:
        restarts = 0
        while True:
            start_time = time.monotonic()
            reason = await self._wait_for_failure()
            self._callbacks.on_down(reason)
            await self._stop()
            if time.monotonic() - start_time > STABLE_SECONDS:
                restarts = 0
            if restarts >= len(self._restart_delays):
                log_tail = self._read_log_tail()
                self.failure = EngineError(f"{reason}, even after {restarts} restarts.\n{log_tail}")
                return
            self._callbacks.report(f"{reason}; restarting it")
            await asyncio.sleep(self._restart_delays[restarts])
            restarts += 1
            try:
                await self._start_server()
            except (EngineError, OSError) as error:
                self._callbacks.report(str(error).splitlines()[0])
                await self._stop()

    async def _wait_for_failure(self) -> str:
        """Wait until the server exits or stops responding, and return the reason."""
        if self._process is None:
            return "vLLM did not start"
        missed_checks = 0
        while missed_checks < MAX_MISSED_CHECKS:
            try:
                async with asyncio.timeout(PROCESS_CHECK_INTERVAL_SECONDS):
                    code = await self._process.wait()
                return f"vLLM exited with code {code}"
            except TimeoutError:
                error = await self.client.get_health_error(HEALTH_CHECK_TIMEOUT_SECONDS)
                missed_checks = missed_checks + 1 if error is not None else 0
        return "vLLM does not respond"

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _read_log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"(log: {self._log_path})", *lines])


class ExternalVllm:
    """Connects to an external server and checks its health."""

    def __init__(
        self,
        config: VllmEngineConfig,
        callbacks: ServerCallbacks,
        *,
        check_interval: float = CHECK_INTERVAL_SECONDS,
    ) -> None:
        self._config = config
        self._callbacks = callbacks
        self._check_interval = check_interval
        self.client = VllmClient(config.servers[0], _read_key(config))
        self.failure: EngineError | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        seconds = self._config.start_timeout
        try:
            async with asyncio.timeout(seconds):
                while (error := await self.client.get_health_error(HEALTH_CHECK_TIMEOUT_SECONDS)) is not None:
                    self._callbacks.report(str(error))
                    await asyncio.sleep(self._check_interval)
        except TimeoutError as timeout_error:
            raise EngineUnavailable(
                f"The vLLM server at {self.client.url} did not respond within {seconds:g} s."
            ) from timeout_error
        await self._callbacks.on_ready()
        self._watcher = asyncio.create_task(self._watch())

    async def fetch_process_start(self) -> str | None:
        """Return the start time metric, which identifies the process, or None if it is not reported."""
        lines = str(await self.client.get("/metrics", timeout=HEALTH_CHECK_TIMEOUT_SECONDS)).splitlines()
        return next((line for line in lines if line.startswith(START_TIME_METRIC)), None)

    async def close(self) -> None:
        if self._watcher is not None:
            await cancel_and_wait(self._watcher)
        await self.client.close()

    async def _watch(self) -> None:
        is_down = False
        while True:
            await asyncio.sleep(self._check_interval)
            error = await self.client.get_health_error(HEALTH_CHECK_TIMEOUT_SECONDS)
            if error is not None and not is_down:
                is_down = True
                self._callbacks.on_down(str(error))
                self._callbacks.report(str(error))
            elif error is None and is_down:
                try:
                    await self._callbacks.on_ready()
                    is_down = False
                except (EngineError, OSError) as failure:  # for example a full disk
                    self._callbacks.report(str(failure))


def _read_key(config: VllmEngineConfig) -> str | None:
    if config.api_key_env is None:
        return None
    if key := os.environ.get(config.api_key_env):
        return key
    raise ConfigError(
        f"engine.api_key_env: the environment variable {config.api_key_env} is not set; "
        "set it to the server's API key."
    )
