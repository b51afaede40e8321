"""The actor that holds a role on its node: the same supervisor as on one machine, for one role.

It belongs to the driver and hears from it all the time. When it does not for too long it ends its role,
for the driver has then started another one elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from instar.cluster.base import ListenAddress
from instar.cluster.layout import RunFolder
from instar.cluster.supervisor import HOST_ENV, Supervisor
from instar.config import RunConfig
from instar.errors import InstarError
from instar.gateway.auth import is_loopback

WORKER_VARIABLES = (
    "OMP_NUM_THREADS",
    "RAY_CLIENT_MODE",
    "RAY_JOB_ID",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_RAYLET_PID",
)
"""Variables that Ray gives its worker, and that mean something else in the role's process."""
ROLES_USING_RAY = ("engine", "teacher", "trainer")
"""Roles that may use the cluster themselves, to carry weights."""
CLUSTER_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables that let a process in; what an agent starts inherits none."""
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RoleSpec:
    """What to run, as the driver sends it. It holds keys, so it is only ever an argument of a call."""

    role: str
    name: str
    arguments: tuple[str, ...]
    python: str | None
    config: str = field(repr=False)
    """The run's config, as JSON."""
    folder: Path
    driver_token: str
    """What the folder's `driver` file holds where it is the driver's own folder."""
    cwd: Path
    env: Mapping[str, str] = field(repr=False)
    exclude_env: frozenset[str]
    listen: ListenAddress | None
    """Where to listen. A loopback address stands for the node's own, which the others can reach, unless there
    are no others."""
    is_single_machine: bool
    """Whether the cluster is this machine alone."""
    driver_timeout: float
    """Seconds without a word from the driver after which to end."""


@dataclass(frozen=True)
class PlacedRole:
    host: str
    node_id: str
    url: str
    log: str
    shares_folder: bool
    """Whether the run's folder is the driver's own."""


@dataclass(frozen=True)
class RoleReport:
    generation: int
    """How often it was told to start."""
    restarts: int
    exit_code: int | None
    """Once it has ended for good."""
    failure: str | None
    """Why the run cannot go on."""
    events: tuple[str, ...]
    """What a person should know, since the last report."""


class RoleHost:
    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._name = ""
        self._generation = 1
        self._folder = RunFolder(Path())
        self._events: list[str] = []
        self._heard = time.monotonic()
        self._ending: asyncio.Task[None] | None = None

    async def start(self, order: RoleSpec) -> PlacedRole:
        host = "127.0.0.1" if order.is_single_machine else node_address()
        listen = order.listen
        if listen is not None and is_loopback(listen[0]):
            listen = (host, listen[1])
        self._heard = time.monotonic()
        self._ending = asyncio.create_task(self._end_when_alone(order.driver_timeout))
        self._name, self._folder = order.name, RunFolder(order.folder)
        shares = self._prepare_folder(order)
        os.chdir(order.cwd if order.cwd.is_dir() else order.folder)
        self._supervisor = Supervisor(
            self._folder, log=self._events.append, url=lambda server: _url(host, server), host=host
        )
        role = await self._supervisor.start(
            order.role,
            *order.arguments,
            name=order.name,
            python=order.python,
            env={**order.env, HOST_ENV: host, **_ray_address_env(order.role)},
            exclude_env=order.exclude_env
            | (set(WORKER_VARIABLES) - order.env.keys())
            | _withheld(order.role),
            listen=listen,
        )
        return PlacedRole(host, _node_id(), role.url, role.log, shares)

    def _prepare_folder(self, order: RoleSpec) -> bool:
        mark = order.folder / "driver"
        if mark.is_file() and mark.read_text() == order.driver_token:
            return True
        try:
            self._folder.create(RunConfig.model_validate_json(order.config))
        except OSError as error:
            raise InstarError(f"cannot make {order.folder} on {node_address()}: {error.strerror}") from error
        return False

    async def report(self) -> RoleReport:
        """How it is; to be asked for all the time."""
        self._heard = time.monotonic()
        assert self._supervisor is not None
        role = self._supervisor.roles[self._name]
        failed = self._supervisor.failure
        events, self._events[:] = tuple(self._events), []
        return RoleReport(
            generation=self._generation,
            restarts=role.restarts,
            exit_code=role.exit_code.result() if role.exit_code.done() else None,
            failure=str(failed.exception()) if failed.done() else None,
            events=events,
        )

    async def read_metrics(self, offset: int) -> bytes:
        """What the run's metrics file on this node has beyond that many bytes."""
        path = self._folder.path / "metrics.jsonl"
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()

    async def signal(self, number: int) -> None:
        assert self._supervisor is not None
        self._supervisor.signal(self._name, number)

    async def kill(self) -> None:
        assert self._supervisor is not None
        self._supervisor.kill(self._name)

    async def restart(self, timeout: float) -> int:
        """Returns the generation that begins with it."""
        assert self._supervisor is not None
        await self._supervisor.restart(self._name, timeout)
        self._generation += 1
        return self._generation

    async def tail(self, lines: int) -> str:
        assert self._supervisor is not None
        return await self._supervisor.tail(self._name, lines)

    async def _end_when_alone(self, patience: float) -> None:
        while time.monotonic() - self._heard < patience:  # noqa: ASYNC110 - the driver's calls move it on
            await asyncio.sleep(POLL_SECONDS)
        try:
            if self._supervisor is not None:
                self._supervisor.kill(self._name)
        finally:
            os._exit(1)


def node_address() -> str:
    """Of this node, as the others of the cluster know it."""
    return str(import_module("ray.util").get_node_ip_address())


def _node_id() -> str:
    return str(_ray_context().get_node_id())


def _ray_address_env(role: str) -> dict[str, str]:
    """The address of the cluster, for a role that uses it itself."""
    return {"RAY_ADDRESS": str(_ray_context().gcs_address)} if role in ROLES_USING_RAY else {}


def _withheld(role: str) -> frozenset[str]:
    return frozenset() if role in ROLES_USING_RAY else frozenset(CLUSTER_VARIABLES)


def _ray_context() -> Any:
    return import_module("ray").get_runtime_context()


def _url(host: str, server: socket.socket) -> str:
    port = server.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
