"""Where the roles of a run are, as the store tells: a role that moves to another machine is found again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from instar.cluster.base import RoleHandle
from instar.cluster.context import HEARTBEAT_SECONDS
from instar.engines.base import Engine
from instar.engines.pool import EnginePool, PolicySource
from instar.engines.remote import RemoteEngine
from instar.errors import EngineUnavailable, InstarError
from instar.store.base import Store
from instar.types import Endpoint

DRAINING = "draining"
"""So begins what a role says of itself that is drained."""
POLL_SECONDS = 1.0
"""Seconds between two looks at where the roles are."""
ANSWER_SECONDS = 2.0
"""That one engine may keep others waiting."""


class EndpointDirectory:
    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    async def register(self, role: RoleHandle) -> None:
        """Say where a role is, before it does so itself."""
        await self._store.put_endpoint(
            Endpoint(self._run_id, role.role, role.name, role.url, 0, "starting", role.log, time.time())
        )

    async def take_lease(self, name: str) -> str:
        """A new one for the role of this name; who has an earlier one is out."""
        return str(await self._store.take_lease(self._run_id, name))

    async def list_urls(self, role: str, *, draining: bool = True) -> dict[str, str]:
        """Those of the role's processes that listen, by name. ``draining``: also of those that are about to
        end."""
        entries = await self._store.endpoints(self._run_id)
        return {
            entry.name: entry.url
            for entry in entries
            if entry.role == role and entry.url and (draining or not entry.doing.startswith(DRAINING))
        }

    async def wait_for_urls(self, role: str, timeout: float = 60.0) -> dict[str, str]:
        """Once there are any. Raises EngineUnavailable where there are none in time."""
        deadline = time.monotonic() + timeout
        while not (found := await self.list_urls(role)):
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"the run has no {role} yet")
            await asyncio.sleep(0.1)
        return found

    async def watch_url(self, role: str, tell: Callable[[str], None]) -> None:
        """Tell again and again where a role is that there is one of."""
        while True:
            for url in (await self.list_urls(role)).values():
                tell(url)
            await asyncio.sleep(HEARTBEAT_SECONDS)


class EngineConnections:
    """The engines of a run, wherever they are. A connection is kept for as long as its engine is at its
    address."""

    def __init__(
        self, directory: EndpointDirectory, token: str, role: str = "engine", *, skip_silent: bool = False
    ) -> None:
        """``skip_silent``: leave out those that do not answer, as long as others do."""
        self._skip_silent = skip_silent
        self._directory = directory
        self._role = role
        self._token = token
        self._known: dict[str, RemoteEngine] = {}
        """By address."""

    async def list_current(self) -> list[Engine]:
        """Those that have answered since they came to where they are, also when they do not just now. Not
        those that are drained: soon nobody would answer."""
        urls = await self._directory.list_urls(self._role, draining=False)
        await self._forget_all_but(urls)
        fresh = [url for url in urls.values() if url not in self._known]
        await asyncio.gather(*map(self._meet, fresh))
        known: list[Engine] = [self._known[url] for url in urls.values() if url in self._known]
        if not self._skip_silent:
            return known
        answers = await asyncio.gather(*map(_answers, known))
        return [engine for engine, answered in zip(known, answers, strict=True) if answered] or known

    async def wait_for_first(self, timeout: float = 300.0) -> list[Engine]:
        """The current ones, as soon as one has answered. Raises EngineUnavailable where none does in time."""
        deadline = time.monotonic() + timeout
        while not (found := await self.list_current()):
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"no {self._role} of the run has answered within {timeout:g} s")
            await asyncio.sleep(0.1)
        return found

    async def close(self) -> None:
        await self._forget_all_but({})

    async def _meet(self, url: str) -> None:
        engine = RemoteEngine(url, self._token)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await engine.refresh()
        except (EngineUnavailable, TimeoutError):
            await engine.close()
        else:
            self._known[url] = engine

    async def _forget_all_but(self, urls: Mapping[str, str]) -> None:
        for url in [url for url in self._known if url not in urls.values()]:
            await self._known.pop(url).close()


async def _answers(engine: Engine) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await engine.status()
    except (InstarError, TimeoutError):
        return False
    return True


class DiscoveredEnginePool(EnginePool):
    """The engines of a run as one, wherever they are."""

    def __init__(
        self,
        directory: EndpointDirectory,
        token: str,
        *,
        role: str = "engine",
        newest: PolicySource | None = None,
    ) -> None:
        super().__init__([], newest_policy=newest)
        self._directory = directory
        self._role = role
        self._token = token
        self._by_url: dict[str, RemoteEngine] = {}

    async def start(self, timeout: float = 300.0) -> None:
        following = asyncio.create_task(self.watch_endpoints())
        try:
            await self._directory.wait_for_urls(self._role, timeout)
            await super().start(timeout)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def watch_endpoints(self) -> None:
        """Keep up with the store, until cancelled."""
        while True:
            urls = (await self._directory.list_urls(self._role)).values()
            self._by_url = {url: self._by_url.get(url) or RemoteEngine(url, self._token) for url in urls}
            await self.replace(list(self._by_url.values()))
            await asyncio.sleep(POLL_SECONDS)
