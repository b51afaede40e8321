"""The actor that runs one role on its node, with the same supervisor as on a single machine.

The driver polls the actor continuously. If the polls stop for too long, the actor kills its role, because the
driver has then started the role on another node.
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
"""Variables that Ray sets for its worker and that would be wrong in the role's process."""
ROLES_USING_RAY = ("engine", "teacher", "trainer")
"""Roles that may use the cluster themselves, to transfer weights."""
CLUSTER_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables that give access to the cluster; processes of agents must not inherit them."""
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RoleSpec:
    """The role that an actor runs. It holds keys, so the driver passes it only as an argument of a call."""

    role: str
    name: str
    arguments: tuple[str, ...]
    python: str | None
    config: str = field(repr=False)
    """Config of the run as JSON."""
    folder: Path
    driver_token: str
    """Content of the `driver` file, which identifies the driver's own folder."""
    cwd: Path
    env: Mapping[str, str] = field(repr=False)
    exclude_env: frozenset[str]
    listen: ListenAddress | None
    """Address to listen on. On several machines, the node's own address replaces a loopback address."""
    is_single_machine: bool
    """True if the cluster consists of this machine only."""
    driver_timeout: float
    """Seconds without a call from the driver after which the role is killed."""


@dataclass(frozen=True)
class PlacedRole:
    host: str
    node_id: str
    url: str
    log: str
    shares_folder: bool
    """True if the run's folder is the driver's own."""


@dataclass(frozen=True)
class RoleReport:
    generation: int
    """Number of times that the role was told to start."""
    restarts: int
    exit_code: int | None
    """Exit code, if the role has exited and will not be restarted."""
    failure: str | None
    """Error that fails the run, if any."""
    events: tuple[str, ...]
    """Messages for the user since the last report."""


class RoleHost:
    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._name = ""
        self._generation = 1
        self._folder = RunFolder(Path())
        self._events: list[str] = []
        self._last_call = time.monotonic()
        self._ending: asyncio.Task[None] | None = None

    async def start(self, spec: RoleSpec) -> PlacedRole:
        host = "127.0.0.1" if spec.is_single_machine else node_address()
        listen = spec.listen
        if listen is not None and is_loopback(listen[0]):
            listen = (host, listen[1])
        self._last_call = time.monotonic()
        self._ending = asyncio.create_task(self._kill_without_driver(spec.driver_timeout))
        self._name, self._folder = spec.name, RunFolder(spec.folder)
        shares = self._prepare_folder(spec)
        os.chdir(spec.cwd if spec.cwd.is_dir() else spec.folder)
        self._supervisor = Supervisor(
            self._folder, log=self._events.append, url=lambda server: _url(host, server), host=host
        )
        role = await self._supervisor.start(
            spec.role,
            *spec.arguments,
            name=spec.name,
            python=spec.python,
            env={**spec.env, HOST_ENV: host, **_ray_address_env(spec.role)},
            exclude_env=spec.exclude_env
            | (set(WORKER_VARIABLES) - spec.env.keys())
            | _withheld_variables(spec.role),
            listen=listen,
        )
        return PlacedRole(host, _node_id(), role.url, role.log, shares)

    def _prepare_folder(self, spec: RoleSpec) -> bool:
        token_file = spec.folder / "driver"
        if token_file.is_file() and token_file.read_text() == spec.driver_token:
            return True
        try:
            self._folder.create(RunConfig.model_validate_json(spec.config))
        except OSError as error:
            raise InstarError(f"cannot create {spec.folder} on {node_address()}: {error.strerror}") from error
        return False

    async def report(self) -> RoleReport:
        """Return the state of the role. The driver calls this continuously."""
        self._last_call = time.monotonic()
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
        """Return the content of the run's metrics file on this node, starting at ``offset``."""
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
        """Restart the role and return the number of its new generation."""
        assert self._supervisor is not None
        await self._supervisor.restart(self._name, timeout)
        self._generation += 1
        return self._generation

    async def tail(self, lines: int) -> str:
        assert self._supervisor is not None
        return await self._supervisor.tail(self._name, lines)

    async def _kill_without_driver(self, timeout: float) -> None:
        while time.monotonic() - self._last_call < timeout:  # noqa: ASYNC110 - set by calls of the driver
            await asyncio.sleep(POLL_SECONDS)
        try:
            if self._supervisor is not None:
                self._supervisor.kill(self._name)
        finally:
            os._exit(1)


def node_address() -> str:
    """Return the address of this node in the cluster."""
    return str(import_module("ray.util").get_node_ip_address())


def _node_id() -> str:
    return str(_ray_context().get_node_id())


def _ray_address_env(role: str) -> dict[str, str]:
    """Return the variable with the cluster's address if the role uses the cluster, else no variable."""
    return {"RAY_ADDRESS": str(_ray_context().gcs_address)} if role in ROLES_USING_RAY else {}


def _withheld_variables(role: str) -> frozenset[str]:
    return frozenset() if role in ROLES_USING_RAY else frozenset(CLUSTER_VARIABLES)


def _ray_context() -> Any:
    return import_module("ray").get_runtime_context()


def _url(host: str, server: socket.socket) -> str:
    port = server.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
