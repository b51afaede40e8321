"""A vLLM server that was started by someone else."""

from __future__ import annotations

import asyncio
import os

from instar.config import VllmEngineConfig
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.process import HEALTH_CHECK_TIMEOUT, ServerCallbacks
from instar.errors import ConfigError, EngineError, EngineUnavailable

CHECK_INTERVAL = 2.0
START_METRIC = "process_start_time_seconds "
"""The start time, which identifies a process of the server."""


class ExternalVllm:
    """Connects to the server at ``config.servers`` and checks its health, as VllmProcess does for a child
    process."""

    def __init__(
        self, config: VllmEngineConfig, callbacks: ServerCallbacks, *, check_interval: float = CHECK_INTERVAL
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
                while (error := await self._check()) is not None:
                    self._callbacks.report(str(error))
                    await asyncio.sleep(self._check_interval)
        except TimeoutError as timeout:
            raise EngineUnavailable(
                f"The vLLM server at {self.client.url} did not respond within {seconds:g} s."
            ) from timeout
        await self._callbacks.on_ready()
        self._watcher = asyncio.create_task(self._watch())

    async def process_start(self) -> str | None:
        """Return the start time of the server's process, or None if the server does not report it."""
        lines = str(await self.client.get("/metrics", timeout=HEALTH_CHECK_TIMEOUT)).splitlines()
        return next((line for line in lines if line.startswith(START_METRIC)), None)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self.client.close()

    async def _watch(self) -> None:
        is_down = False
        while True:
            await asyncio.sleep(self._check_interval)
            error = await self._check()
            if error is not None and not is_down:
                is_down = True
                self._callbacks.on_down(str(error))
                self._callbacks.report(str(error))
            elif error is None and is_down:
                try:
                    await self._callbacks.on_ready()
                    is_down = False
                except (
                    EngineError,
                    OSError,
                ) as failure:  # for example a full disk; the next check tries again
                    self._callbacks.report(str(failure))

    async def _check(self) -> EngineError | None:
        try:
            await self.client.get("/health", timeout=HEALTH_CHECK_TIMEOUT)
        except EngineError as error:
            return error
        return None


def _read_key(config: VllmEngineConfig) -> str | None:
    if config.api_key_env is None:
        return None
    if key := os.environ.get(config.api_key_env):
        return key
    raise ConfigError(f"engine.api_key_env: the environment variable {config.api_key_env} is not set.")
