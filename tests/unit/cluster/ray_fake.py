"""A fake of the parts of `ray` that `RayCluster` uses, with a single node."""

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


class FakeRayError(Exception): ...


class FakeActorUnavailableError(FakeRayError): ...


class FakeRayTaskError(FakeRayError): ...


class FakeActor:
    """The actor that runs a role, with its remote methods."""

    def __init__(self, ray: FakeRay) -> None:
        self._ray = ray
        self.alive = True
        for method in (self._start, self._report, self._read_metrics, self._signal, self._kill):
            remote = SimpleNamespace(remote=lambda *a, method=method: asyncio.ensure_future(method(*a)))
            setattr(self, method.__name__[1:], remote)

    async def _start(self, spec: RoleSpec) -> PlacedRole:
        self._ray.started.append(spec)
        await self._ray.on_start()
        return PlacedRole("h", "n1", "http://h:1", "h:log", self._ray.shares_folder)

    async def _report(self) -> RoleReport:
        if not self.alive:
            raise FakeRayError("the actor died")
        return RoleReport(1, 0, None, None, ())

    async def _read_metrics(self, offset: int) -> bytes:
        await asyncio.sleep(0.05)
        return b""

    async def _signal(self, number: int) -> None: ...

    async def _kill(self) -> None:
        self.alive = False


class FakeRay:
    exceptions = SimpleNamespace(
        ActorUnavailableError=FakeActorUnavailableError, RayTaskError=FakeRayTaskError, RayError=FakeRayError
    )

    def __init__(self, *, shares_folder: bool = True) -> None:
        self.shares_folder = shares_folder
        self.started: list[RoleSpec] = []
        self.actors: list[FakeActor] = []
        self.on_start: Callable[[], Any] = lambda: asyncio.sleep(0)
        """A callback that is awaited while a role starts."""
        self.on_shutdown: Callable[[], None] = lambda: None

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "n1", "NodeManagerAddress": "h", "Alive": True, "Resources": {"CPU": 8.0}}]

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._create_actor))

    def _create_actor(self) -> FakeActor:
        self.actors.append(FakeActor(self))
        return self.actors[-1]

    def kill(self, actor: FakeActor) -> None:
        actor.alive = False

    def shutdown(self) -> None:
        self.on_shutdown()


class FakeDirectory(EndpointDirectory):
    """An endpoint directory without a store."""

    def __init__(self) -> None:
        self.last_lease = 1
        self.registered: list[str] = []

    async def take_lease(self, name: str) -> str:
        self.last_lease += 1
        return str(self.last_lease)

    async def register(self, role: RoleHandle) -> None:
        self.registered.append(role.name)


def make_cluster(ray: FakeRay, folder: Path, log: Callable[[str], None] = print) -> RayCluster:
    run_folder = RunFolder(folder / "run")
    config = RunConfig.model_validate(
        {
            "dir": str(run_folder.path),
            "cluster": {"type": "ray", "address": "auto"},
            "store": {"type": "postgres", "url": "postgresql://u@h/db"},
        }
    )
    run_folder.create(config)
    return RayCluster(ray, config, run_folder, FakeDirectory(), log=log)
