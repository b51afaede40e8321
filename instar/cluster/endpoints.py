"""Look up the addresses of a run's roles in the store, and follow roles that move to other machines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from instar.cluster.base import RoleHandle
from instar.cluster.context import ENGINE_TOKEN_ENV, HEARTBEAT_INTERVAL_SECONDS, RoleContext
from instar.cluster.layout import engine_names, teacher_names
from instar.cluster.tasks import background_tasks, wait_forever
from instar.config import LocalClusterConfig
from instar.engines.base import Engine
from instar.engines.pool import EnginePool, PolicySource
from instar.engines.remote import RemoteEngine
from instar.errors import EngineUnavailable, InstarError
from instar.store.base import Store
from instar.types import Endpoint

T = TypeVar("T")

DRAINING = "draining"
"""The prefix of the activity that a draining role announces."""
POLL_INTERVAL_SECONDS = 1.0
STATUS_TIMEOUT_SECONDS = 2.0
"""Timeout for one engine's status, so that an unreachable engine does not delay the others."""


async def _poll(fetch: Callable[[], Awaitable[list[T]]], timeout: float, failure: str) -> list[T]:
    deadline = time.monotonic() + timeout
    while not (items := await fetch()):
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"{failure} within {timeout:g} s")
        await asyncio.sleep(0.1)
    return items


class EndpointDirectory:
    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    async def register(self, role: RoleHandle) -> None:
        """Write a role's address to the store, so that it can be found before the role announces itself."""
        await self._store.put_endpoint(
            Endpoint(self._run_id, role.role, role.name, role.url, 0, "starting", role.log, time.time())
        )

    async def take_lease(self, name: str) -> str:
        """Return a new lease for the role ``name``. Holders of earlier leases can no longer write."""
        return str(await self._store.take_lease(self._run_id, name))

    async def list_urls(self, role: str, *, include_draining: bool = True) -> list[str]:
        """Return the URLs of the role's listening processes, by default including draining ones."""
        entries = [e for e in await self._store.endpoints(self._run_id) if e.role == role and e.url]
        return [entry.url for entry in entries if include_draining or not entry.doing.startswith(DRAINING)]

    async def wait_for_urls(self, role: str, timeout: float = 60.0) -> list[str]:
        """Return the role's URLs once there is one. Raises EngineUnavailable after ``timeout`` seconds."""
        return await _poll(lambda: self.list_urls(role), timeout, f"no {role} announced its address")

    async def watch_url(self, role: str, set_url: Callable[[str], None]) -> None:
        """Pass the current URL of the role's only process to ``set_url`` repeatedly, until cancelled."""
        while True:
            for url in await self.list_urls(role):
                set_url(url)
            await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)


class EngineConnections:
    """The trainer's connections to the engines of a run. ``skip_unresponsive`` excludes engines that do not
    respond, unless none of them responds."""

    def __init__(
        self, directory: EndpointDirectory, token: str, lease: int, *, skip_unresponsive: bool = False
    ) -> None:
        self._directory = directory
        self._token = token
        self._lease = lease
        self._skip_unresponsive = skip_unresponsive
        self._by_url: dict[str, RemoteEngine] = {}

    async def refresh(self) -> list[Engine]:
        """Connect to engines at new addresses, and return all engines that have responded, except draining
        ones. Unless ``skip_unresponsive`` is set, this includes engines that no longer respond."""
        urls = await self._directory.list_urls("engine", include_draining=False)
        await self.close(keep=urls)
        await asyncio.gather(*(self._connect(url) for url in urls if url not in self._by_url))
        engines: list[Engine] = [self._by_url[url] for url in urls if url in self._by_url]
        if not self._skip_unresponsive:
            return engines
        responses = await asyncio.gather(*map(_is_responsive, engines))
        pairs = zip(engines, responses, strict=True)
        return [engine for engine, is_responsive in pairs if is_responsive] or engines

    async def wait_for_first(self, timeout: float = 300.0) -> list[Engine]:
        """Return the engines once one has responded. Raises EngineUnavailable after ``timeout`` seconds."""
        return await _poll(self.refresh, timeout, "no engine responded")

    async def _connect(self, url: str) -> None:
        engine = RemoteEngine(url, self._token, self._lease)
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
                await engine.refresh()
        except (EngineUnavailable, TimeoutError):
            await engine.close()
        else:
            self._by_url[url] = engine

    async def close(self, keep: Collection[str] = ()) -> None:
        """Close the connections, except those to the addresses in ``keep``."""
        for url in [url for url in self._by_url if url not in keep]:
            await self._by_url.pop(url).close()


async def _is_responsive(engine: Engine) -> bool:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
            await engine.status()
    except (InstarError, TimeoutError):
        return False
    return True


class DiscoveredEnginePool(EnginePool):
    """A pool of the run's engines that is updated when their addresses in the store change."""

    def __init__(
        self,
        directory: EndpointDirectory,
        token: str,
        *,
        role: str = "engine",
        newest_policy: PolicySource | None = None,
        max_versions_behind: int = 0,
    ) -> None:
        super().__init__([], newest_policy=newest_policy, max_versions_behind=max_versions_behind)
        self._directory = directory
        self._role = role
        self._token = token
        self._by_url: dict[str, RemoteEngine] = {}

    async def connect(self, timeout: float = 300.0) -> None:
        async with background_tasks(self.watch_endpoints()):
            await self._directory.wait_for_urls(self._role, timeout)
            await super().connect(timeout)

    async def watch_endpoints(self) -> None:
        """Update the pool whenever the addresses in the store change, until cancelled."""
        while True:
            urls = await self._directory.list_urls(self._role)
            self._by_url = {url: self._by_url.get(url) or RemoteEngine(url, self._token) for url in urls}
            await self.replace(list(self._by_url.values()))
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


async def connect_to_engines(
    context: RoleContext, store: Store, role: str, *, newest_policy: PolicySource | None = None
) -> tuple[Engine | None, Callable[[], Coroutine[Any, Any, None]]]:
    """Return the run's engines or teachers as one engine, or None if it has none, and a function that watches
    their addresses. The caller must run it in the background, so that moved engines are found again."""
    directory, token = EndpointDirectory(store, context.run_id), os.environ[ENGINE_TOKEN_ENV]
    names = engine_names(context.config) if role == "engine" else teacher_names(context.config)
    if not names:
        return None, wait_forever
    if isinstance(context.config.cluster, LocalClusterConfig) and len(names) == 1:
        # A single engine keeps its address, and requests that arrive during a restart wait in its socket.
        (url,) = await directory.wait_for_urls(role, timeout=300)
        return await RemoteEngine.connect(url, token, 300), wait_forever
    behind = context.config.sync.every - 1
    pool = DiscoveredEnginePool(
        directory, token, role=role, newest_policy=newest_policy, max_versions_behind=behind
    )
    await pool.connect()
    return pool, pool.watch_endpoints
