"""The actor that runs one role on its node, and the data that it exchanges with the driver.

The driver polls the actor continuously. If the polls stop for too long, the actor kills its role, because the
driver has exited, or has started the role on a different node.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from instar.cluster.base import ListenAddress
from instar.cluster.layout import RunFolder
from instar.cluster.supervisor import HOST_ENV, Supervisor
from instar.config import PostgresStoreConfig, RayClusterConfig, RunConfig
from instar.errors import InstarError
from instar.gateway.auth import is_loopback
from instar.umask import PRIVATE_UMASK

WORKER_VARIABLES = (
    "OMP_NUM_THREADS",
    "RAY_CLIENT_MODE",
    "RAY_JOB_ID",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_RAYLET_PID",
)
"""Variables that Ray sets for its worker but that would be wrong in the role's process."""
ROLES_USING_RAY = ("engine", "teacher", "trainer")
"""Roles that may use the cluster themselves, to transfer weights."""
CLUSTER_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables that give access to the cluster. Agent processes must not inherit them."""
ALWAYS_FORWARDED_VARIABLES = ("PYTHONPATH", "CUDA_HOME", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE")
POLL_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class RoleSpec:
    """The role that an actor runs. It contains keys, so it must only be passed as a method argument, never in
    `runtime_env`, which Ray displays."""

    role: str
    name: str
    arguments: tuple[str, ...]
    python: str | None
    config: str = field(repr=False)
    """Config of the run as JSON."""
    folder: Path
    driver_token: str
    """Content of the file `driver` in the run's folder, which identifies the driver's own folder."""
    cwd: Path
    env: Mapping[str, str] = field(repr=False)
    exclude_env: frozenset[str]
    listen: ListenAddress | None
    """Address to listen on. If there are several machines, the node's address replaces a loopback address."""
    is_single_machine: bool
    driver_timeout: float
    """The role is killed if `RoleHost.report` is not called for this many seconds."""


@dataclass(frozen=True)
class PlacedRole:
    host: str
    node_id: str
    url: str
    log: str
    shares_folder: bool
    """True if the run's folder on the node is the driver's own folder."""


@dataclass(frozen=True)
class RoleReport:
    generation: int
    """Starts at 1 and is incremented by `RoleHost.restart`, but not by restarts after a crash."""
    restarts: int
    exit_code: int | None
    failure: str | None
    events: tuple[str, ...]
    """Messages for the user since the previous report."""


class RoleHost:
    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._name = ""
        self._generation = 1
        self._folder = RunFolder(Path())
        self._events: list[str] = []
        self._last_poll_time = time.monotonic()
        self._background_tasks: set[asyncio.Task[None]] = set()

    async def start(self, spec: RoleSpec) -> PlacedRole:
        host = "127.0.0.1" if spec.is_single_machine else node_address()
        listen = spec.listen
        if listen is not None and is_loopback(listen[0]):
            listen = (host, listen[1])
        self._last_poll_time = time.monotonic()
        self._background_tasks.add(asyncio.create_task(self._exit_when_driver_is_lost(spec.driver_timeout)))
        self._name, self._folder = spec.name, RunFolder(spec.folder)
        shares_folder = self._prepare_folder(spec)
        os.chdir(spec.cwd if spec.cwd.is_dir() else spec.folder)
        self._supervisor = Supervisor(self._folder, log=self._events.append, host=host)
        ray_context = import_module("ray").get_runtime_context()
        uses_ray = spec.role in ROLES_USING_RAY
        ray_env = {"RAY_ADDRESS": str(ray_context.gcs_address)} if uses_ray else {}
        withheld = (set(WORKER_VARIABLES) - spec.env.keys()) | (set() if uses_ray else {*CLUSTER_VARIABLES})
        role = await self._supervisor.start(
            spec.role,
            *spec.arguments,
            name=spec.name,
            python=spec.python,
            env={**spec.env, HOST_ENV: host, **ray_env},
            exclude_env=spec.exclude_env | withheld,
            listen=listen,
        )
        return PlacedRole(host, str(ray_context.get_node_id()), role.url, role.log, shares_folder)

    def _prepare_folder(self, spec: RoleSpec) -> bool:
        """Set the umask, and return True if the run's folder is the driver's own. Otherwise create it and
        write the config."""
        os.umask(PRIVATE_UMASK)
        token_file = spec.folder / "driver"
        if token_file.is_file() and token_file.read_text() == spec.driver_token:
            return True
        try:
            self._folder.create(RunConfig.model_validate_json(spec.config))
        except OSError as error:
            raise InstarError(f"cannot create {spec.folder} on {node_address()}: {error.strerror}") from error
        return False

    async def report(self) -> RoleReport:
        """Return the role's state and the events since the last call. The driver polls this method."""
        self._last_poll_time = time.monotonic()
        assert self._supervisor is not None
        role = self._supervisor.roles[self._name]
        failure = self._supervisor.failure
        events, self._events[:] = tuple(self._events), []
        return RoleReport(
            generation=self._generation,
            restarts=role.restarts,
            exit_code=role.exit_code.result() if role.exit_code.done() else None,
            failure=str(failure.exception()) if failure.done() else None,
            events=events,
        )

    async def read_metrics(self, offset: int) -> bytes:
        """Return the content of the run's metrics file on this node, starting at byte ``offset``."""
        path = self._folder.path / "metrics.jsonl"
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()

    async def signal(self, signum: int) -> None:
        assert self._supervisor is not None
        self._supervisor.signal(self._name, signum)

    async def kill(self) -> None:
        assert self._supervisor is not None
        self._supervisor.kill(self._name)

    async def restart(self, timeout: float) -> int:
        """Restart the role and return its new generation (see `RoleReport`)."""
        assert self._supervisor is not None
        await self._supervisor.restart(self._name, timeout)
        self._generation += 1
        return self._generation

    async def tail(self, lines: int) -> str:
        assert self._supervisor is not None
        return await self._supervisor.tail(self._name, lines)

    async def _exit_when_driver_is_lost(self, timeout: float) -> None:
        """Kill the role and exit if the driver does not call `report` for ``timeout`` seconds."""
        while time.monotonic() - self._last_poll_time < timeout:  # noqa: ASYNC110 - updated by `report`
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        try:
            if self._supervisor is not None:
                self._supervisor.kill(self._name)
        finally:
            os._exit(1)


def node_address() -> str:
    return str(import_module("ray.util").get_node_ip_address())


def forwarded_env(
    config: RunConfig, environment: Mapping[str, str], exclude: frozenset[str]
) -> dict[str, str]:
    """Return the driver's variables that a role on a different node may need: variables that are always
    forwarded, variables that settings refer to, and variables in `cluster.env`, but none in ``exclude``."""
    assert isinstance(config.cluster, RayClusterConfig)
    names = {
        *ALWAYS_FORWARDED_VARIABLES,
        *_variable_names(config.model_dump(mode="json")),
        *config.cluster.env,
    }
    if isinstance(config.store, PostgresStoreConfig) and (
        password := config.store.password_env_name(environment)
    ):
        names.add(password)
    return {name: environment[name] for name in sorted(names - exclude) if name in environment}


def _variable_names(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of variables in settings such as `api_key_env`."""
    for key, value in settings.items():
        if key.endswith("_env") and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _variable_names(cast(Mapping[str, Any], value))
        elif isinstance(value, list):
            for item in cast(list[Any], value):
                if isinstance(item, Mapping):
                    yield from _variable_names(cast(Mapping[str, Any], item))


class MetricsMirror:
    """Appends the lines that roles on other nodes write to their metrics files to the file on this node."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._lines = set(self._path.read_bytes().splitlines()) if self._path.is_file() else set[bytes]()
        self._offsets: dict[str, int] = {}
        """Number of bytes that were copied from each host's file."""
        self._locks: dict[str, asyncio.Lock] = {}

    async def fetch(self, host: str, read: Callable[[int], Awaitable[bytes]]) -> None:
        """Append the host's new complete lines. ``read`` returns its file's content from an offset."""
        # Two roles on one host write to the same file.
        async with self._locks.setdefault(host, asyncio.Lock()):
            offset = self._offsets.get(host, 0)
            data = await read(offset)
            complete_lines = data[: data.rfind(b"\n") + 1]
            # An earlier driver may already have copied some of the lines.
            new_lines = [line for line in complete_lines.splitlines() if line not in self._lines]
            if new_lines:
                with self._path.open("ab") as file:
                    file.write(b"\n".join(new_lines) + b"\n")
                self._lines.update(new_lines)
            self._offsets[host] = offset + len(complete_lines)
