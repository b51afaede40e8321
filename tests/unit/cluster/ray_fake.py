"""A Ray cluster of one node without Ray: as much of the `ray` module as `RayCluster` uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instar.cluster.base import RoleHandle
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.layout import RunFolder
from instar.cluster.ray.cluster import RayCluster
from instar.cluster.ray.host import PlacedRole, RoleReport, RoleSpec
from instar.config import RunConfig


class RayError(Exception): ...


class Unavailable(RayError): ...


class TaskError(RayError): ...


class Actor:
    """What holds a role, for those who have its handle."""

    def __init__(self, ray: FakeRay) -> None:
        self._ray = ray
        self.alive = True
        for method in (self._start, self._report, self._read_metrics, self._signal, self._kill):
            remote = SimpleNamespace(remote=lambda *a, method=method: asyncio.ensure_future(method(*a)))
            setattr(self, method.__name__[1:], remote)

    async def _start(self, order: RoleSpec) -> PlacedRole:
        self._ray.started.append(order)
        await self._ray.on_start()
        return PlacedRole("h", "n1", "http://h:1", "h:log", self._ray.shares_folder)

    async def _report(self) -> RoleReport:
        if not self.alive:
            raise RayError("the actor died")
        return RoleReport(1, 0, None, None, ())

    async def _read_metrics(self, offset: int) -> bytes:
        await asyncio.sleep(0.05)
        return b""

    async def _signal(self, number: int) -> None: ...

    async def _kill(self) -> None:
        self.alive = False


class FakeRay:
    exceptions = SimpleNamespace(ActorUnavailableError=Unavailable, RayTaskError=TaskError, RayError=RayError)

    def __init__(self, *, shares_folder: bool = True) -> None:
        self.shares_folder = shares_folder
        self.started: list[RoleSpec] = []
        self.actors: list[Actor] = []
        self.on_start: Callable[[], Any] = lambda: asyncio.sleep(0)
        """Awaited while a role starts."""
        self.on_shutdown: Callable[[], None] = lambda: None

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "n1", "NodeManagerAddress": "h", "Alive": True, "Resources": {"CPU": 8.0}}]

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make))

    def _make(self) -> Actor:
        self.actors.append(Actor(self))
        return self.actors[-1]

    def kill(self, actor: Actor) -> None:
        actor.alive = False

    def shutdown(self) -> None:
        self.on_shutdown()


class FakeDirectory(EndpointDirectory):
    """Without a store."""

    def __init__(self) -> None:
        self.leases = 1
        self.entered: list[str] = []

    async def take_lease(self, name: str) -> str:
        self.leases += 1
        return str(self.leases)

    async def register(self, role: RoleHandle) -> None:
        self.entered.append(role.name)


def cluster_on(ray: FakeRay, folder: Path, log: Callable[[str], None] = print) -> RayCluster:
    place = RunFolder(folder / "run")
    config = RunConfig.model_validate(
        {
            "dir": str(place.path),
            "cluster": {"type": "ray", "address": "auto"},
            "store": {"type": "postgres", "url": "postgresql://u@h/db"},
        }
    )
    place.create(config)
    return RayCluster(ray, config, place, FakeDirectory(), log=log)
