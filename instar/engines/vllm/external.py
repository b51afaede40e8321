"""A vLLM server that someone else has started: watched, and given what it should serve when it returns."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from instar.config import VllmEngineConfig
from instar.engines.vllm.client import VllmClient
from instar.errors import ConfigError, EngineError, EngineUnavailable

PERIOD = 2.0
CHECK_SECONDS = 20.0
STARTED = "process_start_time_seconds "
"""The metric that tells one process of a server from the next."""


class ExternalVllm:
    """As VllmProcess, for the address in ``config.servers``."""

    def __init__(
        self,
        config: VllmEngineConfig,
        *,
        up: Callable[[], Awaitable[None]],
        down: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._up, self._down, self._say = up, down, say
        self.client = VllmClient(config.servers[0], _key(config))
        self.failure: EngineError | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Until it answers. Raises EngineUnavailable where it does not within the section's deadline."""
        seconds = self._config.start_timeout
        try:
            async with asyncio.timeout(seconds):
                while (error := await self._check()) is not None:
                    self._say(str(error))
                    await asyncio.sleep(PERIOD)
        except TimeoutError as late:
            raise EngineUnavailable(
                f"the vLLM server at {self.client.url} did not answer within {seconds:g} s"
            ) from late
        await self._up()
        self._watcher = asyncio.create_task(self._watch())

    async def process_start(self) -> str | None:
        """Another one for every process of the server. None: it does not tell."""
        lines = str(await self.client.get("/metrics", timeout=CHECK_SECONDS)).splitlines()
        return next((line for line in lines if line.startswith(STARTED)), None)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self.client.close()

    async def _watch(self) -> None:
        away = False
        while True:
            await asyncio.sleep(PERIOD)
            error = await self._check()
            if error is not None and not away:
                away = True
                self._down(str(error))
                self._say(str(error))
            elif error is None and away:
                try:
                    await self._up()
                    away = False
                except (EngineError, OSError) as refused:  # a full disk among them: it is tried again
                    self._say(str(refused))

    async def _check(self) -> EngineError | None:
        try:
            await self.client.get("/health", timeout=CHECK_SECONDS)
        except EngineError as error:
            return error
        return None


def _key(config: VllmEngineConfig) -> str | None:
    if config.api_key_env is None:
        return None
    if key := os.environ.get(config.api_key_env):
        return key
    raise ConfigError(f"engine.api_key_env: {config.api_key_env} is not set")
