"""Run the roles of a run as actors on a Ray cluster.

Each actor runs one role (`instar.cluster.ray.host`) and restarts it when it dies. If an actor or its node is
lost, this module starts the role on a different node under a new lease, and writes the new address of the
role to the store. The actors belong to this process and exit with it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

import msgspec

from instar.async_utils import run_in_daemon_thread
from instar.cluster.base import RESTART_BACKOFF, RESTART_RESET_SECONDS, Cluster, RoleHandle, RoleOptions
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.layout import RunFolder
from instar.cluster.ray.connect import LOCAL_CLUSTER, connect, resolve_address
from instar.cluster.ray.host import MetricsMirror, PlacedRole, RoleHost, RoleReport, RoleSpec, forwarded_env
from instar.cluster.ray.placement import (
    ClusterNode,
    check_capacity,
    format_resources,
    parse_nodes,
    plan_placement,
)
from instar.cluster.supervisor import LEASE_ENV
from instar.config import RayClusterConfig, RunConfig, SqliteStoreConfig
from instar.errors import ConfigError, InstarError
from instar.gateway.auth import is_loopback

REPORT_INTERVAL_SECONDS = 0.5
CALL_TIMEOUT_SECONDS = 5.0
"""Timeout for one call to an actor."""
HEAD_TIMEOUT_SECONDS = 30.0
PLACEMENT_TIMEOUT_SECONDS = 60.0
"""Timeout for an actor to be placed and to start its role."""
MAX_PLACEMENT_ATTEMPTS = 5
SHUTDOWN_TIMEOUT_SECONDS = 30.0
EXIT_LOST = -int(signal.SIGKILL)
"""Exit code of a role that was killed or lost with its actor."""


class ActorLostError(Exception):
    """Raised if the actor has exited, or has been unreachable for too long."""


@dataclass(eq=False, kw_only=True)
class RayRole(RoleHandle):
    """A role, and the Ray actor that runs it. If the actor is lost, the role gets a new one."""

    spec: RoleSpec
    actor: Any = None
    host: str = ""
    node_id: str = ""
    shares_folder: bool = False
    moves: int = 0
    """Number of times in a row that the actor was lost and replaced."""
    generation: int = 1
    """Starts at 1 and is incremented by `restart`. Exit codes from before a restart are ignored."""
    placed_at: float = 0.0


class RayCluster(Cluster):
    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        folder: RunFolder,
        directory: EndpointDirectory,
        *,
        log: Callable[[str], None],
    ) -> None:
        super().__init__(log=log)
        assert isinstance(config.cluster, RayClusterConfig)
        self.config = config
        self.folder = folder
        self._section = config.cluster
        self._ray = ray
        self._is_single_machine = resolve_address(config.cluster) == LOCAL_CLUSTER
        self._directory = directory
        self._roles: dict[str, RayRole] = {}
        self._unreachable_nodes: set[str] = set()
        self._metrics = MetricsMirror(folder.path)
        self._hosts_file = folder.path / "hosts.json"
        self._driver_token = secrets.token_hex(16)
        (folder.path / "driver").write_text(self._driver_token)

    @classmethod
    async def connect(
        cls, config: RunConfig, folder: RunFolder, directory: EndpointDirectory, *, log: Callable[[str], None]
    ) -> Self:
        """Connect to the cluster and return it. Raises ConfigError if the cluster cannot be reached or cannot
        run this config, and InstarError if it does not respond in time."""
        assert isinstance(config.cluster, RayClusterConfig)
        ray = await connect(resolve_address(config.cluster))
        cluster = cls(ray, config, folder, directory, log=log)
        try:
            nodes = await cluster.nodes()
            if len(nodes) > 1 and isinstance(config.store, SqliteStoreConfig):
                raise ConfigError(
                    "store.type: sqlite only works on one machine, but the Ray cluster has "
                    f"{len(nodes)} nodes; use postgres"
                )
            for role in ("engine", "gateway", "trainer", "rollout", "rewards", "gate"):
                check_capacity(role, plan_placement(role, config, nodes), nodes)
        except BaseException:  # Ray must be shut down after any error
            await cluster.close()
            raise
        log(f"Ray: {len(nodes)} node(s), {', '.join(sorted(node.host for node in nodes))}")
        return cluster

    async def nodes(self) -> list[ClusterNode]:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
                return parse_nodes(await run_in_daemon_thread(self._ray.nodes))
        except TimeoutError as error:
            raise InstarError(
                f"the head node of the Ray cluster did not respond within {HEAD_TIMEOUT_SECONDS:g} s; check "
                "that it is running"
            ) from error

    @property
    def roles(self) -> Mapping[str, RayRole]:
        return self._roles

    def describe_listen_host(self, host: str) -> str:
        return "the address of its node" if is_loopback(host) and not self._is_single_machine else host

    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RayRole:
        name = options.get("name") or role
        if (previous := self._roles.get(name)) is not None:
            self._kill_actor(previous)
        exclude_env = frozenset(options.get("exclude_env", ()))
        spec = RoleSpec(
            role=role,
            name=name,
            arguments=arguments,
            python=options.get("python"),
            config=self.config.model_dump_json(),
            folder=self.folder.path,
            driver_token=self._driver_token,
            cwd=Path.cwd(),
            env={**forwarded_env(self.config, os.environ, exclude_env), **options.get("env", {})},
            exclude_env=exclude_env,
            listen=options.get("listen"),
            is_single_machine=self._is_single_machine,
            driver_timeout=self._section.node_timeout,
        )
        ray_role = RayRole(role, name, spec=spec)
        ray_role.host = previous.host if previous else self._read_hosts().get(name, "")
        self._roles[name] = ray_role
        await self._place(ray_role)
        self._start_watcher(ray_role, self._watch(ray_role))
        return ray_role

    async def _place(self, role: RayRole) -> None:
        """Create an actor on a node with free resources, and start the role there. Raises InstarError if no
        node has the resources or the role cannot start. If the role is told to exit, mark it as exited."""
        reason = ""
        for _ in range(MAX_PLACEMENT_ATTEMPTS):
            await self._create_actor(role)
            try:
                placed: PlacedRole = await self._await_result(
                    role.actor.start.remote(role.spec), PLACEMENT_TIMEOUT_SECONDS
                )
            except InstarError as error:
                self._kill_actor(role)
                # Ray adds text to the message; `cause` is the error that the actor raised.
                raise InstarError(f"{role.name}: {getattr(error, 'cause', None) or error}") from error
            except (ActorLostError, TimeoutError) as error:
                reason = str(error) or f"no node had free resources within {PLACEMENT_TIMEOUT_SECONDS:g} s"
                self._kill_actor(role)
                if self._end_if_stopping(role):
                    return
                await self._renew_lease(role)  # the role may have started even though no response arrived
                continue
            role.host, role.node_id = placed.host, placed.node_id
            role.url, role.log, role.shares_folder = placed.url, placed.log, placed.shares_folder
            role.placed_at, role.generation = time.monotonic(), 1
            hosts = {**self._read_hosts(), role.name: role.host}
            scratch = self._hosts_file.with_suffix(".partial")
            scratch.write_bytes(msgspec.json.encode(hosts))
            scratch.replace(self._hosts_file)
            self._end_if_stopping(role)
            return
        resources = format_resources(plan_placement(role.role, self.config, await self.nodes()))
        raise InstarError(f"{role.name} cannot be placed on the Ray cluster (needs {resources}): {reason}")

    async def _create_actor(self, role: RayRole) -> None:
        nodes = await self.nodes()
        placement = plan_placement(role.role, self.config, nodes)
        options: dict[str, Any] = {
            "num_cpus": placement.cpus,
            "num_gpus": placement.gpus,
            "resources": placement.resources,
            "max_restarts": 0,  # a restarted actor would have no state, so a new actor is created
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        if (node := self._required_node(role, nodes)) is not None:
            affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(node.node_id, soft=False)
        elif unreachable := self._unreachable_nodes & {node.node_id for node in nodes}:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(unreachable))})"}
        role.actor = self._ray.remote(RoleHost).options(**options).remote()

    def _required_node(self, role: RayRole, nodes: list[ClusterNode]) -> ClusterNode | None:
        """Return the node that the role must run on, or None if it may run on any: this process's node if the
        store is a file, and for a trainer the node that has its checkpoints, if that node is reachable."""
        if isinstance(self.config.store, SqliteStoreConfig):
            this_node = self._ray.get_runtime_context().get_node_id()
            return next((node for node in nodes if node.node_id == this_node), None)
        if role.role != "trainer" or not role.host:
            return None
        reachable = (node for node in nodes if node.node_id not in self._unreachable_nodes)
        return next((node for node in reachable if node.host == role.host), None)

    def _read_hosts(self) -> dict[str, str]:
        """Return the last host of each role, including hosts from earlier starts of this run."""
        return msgspec.json.decode(self._hosts_file.read_bytes()) if self._hosts_file.is_file() else {}

    async def _watch(self, role: RayRole) -> None:
        """Follow the actor until this process kills it, and move the role if the actor is lost. The actor
        outlives its role, so that the socket stays open and the log can be read."""
        while role.actor is not None:
            try:
                await self._follow(role)
            except ActorLostError as lost:
                try:
                    await self._move(role, str(lost))
                except InstarError as error:
                    role.set_exit_code(EXIT_LOST)
                    self.fail(error)

    async def _follow(self, role: RayRole) -> None:
        """Handle the actor's reports until this process kills it. Raises ActorLostError if it is lost."""
        last_report = time.monotonic()
        timeout = min(CALL_TIMEOUT_SECONDS, self._section.node_timeout / 3)
        while role.actor is not None:
            try:
                report: RoleReport = await self._await_result(role.actor.report.remote(), timeout)
                await self._handle_report(role, report)
            except TimeoutError as error:
                elapsed = time.monotonic() - last_report
                if elapsed > self._section.node_timeout:
                    self._unreachable_nodes.add(role.node_id)
                    raise ActorLostError(f"no report from {role.host} for {elapsed:.0f} s") from error
                continue
            last_report = time.monotonic()
            self._unreachable_nodes.discard(role.node_id)
            await asyncio.sleep(REPORT_INTERVAL_SECONDS)

    async def _handle_report(self, role: RayRole, report: RoleReport) -> None:
        for event in report.events:
            self.log(event)
        role.restarts = role.moves + report.restarts
        actor = role.actor  # the actor that sent the report; the role may move during the wait below
        if actor is not None and not role.shares_folder and role.role in ("trainer", "rollout"):
            await self._metrics.fetch(
                role.host,
                lambda offset: self._await_result(actor.read_metrics.remote(offset), CALL_TIMEOUT_SECONDS),
            )
        if report.failure is not None:
            self.fail(InstarError(report.failure))
        if report.exit_code is not None and report.generation >= role.generation:
            role.set_exit_code(report.exit_code)

    async def _move(self, role: RayRole, reason: str) -> None:
        self._kill_actor(role)
        if self._end_if_stopping(role) or role.exit_code.done():
            return
        if time.monotonic() - role.placed_at > RESTART_RESET_SECONDS:
            role.moves = 0
        if role.moves >= len(RESTART_BACKOFF):
            message = f"{role.name} was lost {role.moves + 1} times in a row and will not be restarted"
            raise InstarError(f"{message}; last reason: {reason}\n(log: {role.log})")
        self.log(f"{role.name} was lost ({reason}); restarting it on a node with free resources")
        await asyncio.sleep(RESTART_BACKOFF[role.moves])
        role.moves += 1
        if not self._end_if_stopping(role):
            await self._replace_actor(role)

    async def _replace_actor(self, role: RayRole) -> None:
        """Run the role in a new actor. A new lease prevents the previous one from writing to the store."""
        await self._renew_lease(role)
        await self._place(role)
        if role.actor is not None and role.url:
            await self._directory.register(role)

    async def _renew_lease(self, role: RayRole) -> None:
        lease = await self._directory.take_lease(role.name)
        role.spec = replace(role.spec, env={**role.spec.env, LEASE_ENV: lease})

    def _end_if_stopping(self, role: RayRole) -> bool:
        """Mark a role as exited and return True if it was told to exit while lost or being placed."""
        if role.is_stopping:
            self._kill_actor(role)
            role.set_exit_code(EXIT_LOST)
        return role.is_stopping

    def _kill_actor(self, role: RayRole) -> None:
        actor, role.actor = role.actor, None
        if actor is not None:
            self._ray.kill(actor)

    async def _await_result(self, reference: Any, timeout: float) -> Any:
        """Await the result of a call to an actor. Raises ActorLostError if the actor has exited, TimeoutError
        if it cannot be reached or does not respond in time, and any error that it raised."""
        errors = self._ray.exceptions
        try:
            async with asyncio.timeout(timeout):
                return await reference
        except errors.ActorUnavailableError as error:
            await asyncio.sleep(REPORT_INTERVAL_SECONDS)
            raise TimeoutError from error
        except errors.RayTaskError:
            raise  # the actor's own code raised this error
        except errors.RayError as error:
            raise ActorLostError(str(error).strip().splitlines()[0]) from error

    def signal(self, name: str, signum: int = signal.SIGTERM) -> None:
        if (role := self._roles.get(name)) is not None:
            role.is_stopping = True
            if role.actor is not None:
                role.actor.signal.remote(signum)

    def kill(self, name: str) -> None:
        if (role := self._roles.get(name)) is not None:
            role.is_stopping = True
            if role.actor is not None and not role.exit_code.done():
                role.actor.kill.remote()
            role.set_exit_code(EXIT_LOST)

    async def restart(self, name: str, timeout: float = 10.0) -> None:
        role = self._roles[name]
        role.is_stopping = False
        if role.actor is None:
            await self._replace_actor(role)
            if self._end_if_stopping(role):
                return
            self._start_watcher(role, self._watch(role))
        else:
            try:
                role.generation = await self._await_result(
                    role.actor.restart.remote(timeout), timeout + CALL_TIMEOUT_SECONDS
                )
            except (ActorLostError, TimeoutError) as error:
                raise InstarError(
                    f"{name} cannot be restarted: its actor on {role.host} has exited or does not respond"
                ) from error
        if role.exit_code.done():
            role.exit_code = asyncio.get_running_loop().create_future()

    async def tail(self, name: str, lines: int = 12) -> str:
        role = self._roles[name]
        if role.actor is None:
            return ""
        try:
            return await self._await_result(role.actor.tail.remote(lines), CALL_TIMEOUT_SECONDS)
        except (ActorLostError, TimeoutError):
            return ""

    async def close(self) -> None:
        await super().close()
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_SECONDS):
                await run_in_daemon_thread(self._ray.shutdown)
        except TimeoutError:  # not an error, because Ray exits with this process anyway
            self.log(f"Ray did not shut down within {SHUTDOWN_TIMEOUT_SECONDS:g} s")
