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
    parse_nodes,
    plan_placement,
    requested_resources,
)
from instar.cluster.supervisor import LEASE_ENV
from instar.config import RayClusterConfig, RunConfig, SqliteStoreConfig
from instar.errors import ConfigError, InstarError
from instar.gateway.auth import is_loopback

REPORT_INTERVAL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""Timeout for an actor to answer one call."""
HEAD_ANSWER_SECONDS = 30.0
PLACEMENT_SECONDS = 60.0
"""Timeout for an actor to be placed and to start its role."""
MAX_PLACEMENT_ATTEMPTS = 5
SHUTDOWN_SECONDS = 30.0
EXIT_LOST = -int(signal.SIGKILL)
"""Exit code of a role that was killed or lost with its actor."""


class ActorLostError(Exception):
    """Raised if the actor has exited, or has been unreachable for too long."""


@dataclass(eq=False)
class RoleActor(RoleHandle):
    spec: RoleSpec | None = None
    handle: Any = None
    host: str = ""
    node_id: str = ""
    shares_folder: bool = False
    moves: int = 0
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
        self._actors: dict[str, RoleActor] = {}
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
        run this config, and InstarError if it does not answer in time."""
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
            for role in ("engine", "gateway", "trainer", "rollout", "rewards"):
                check_capacity(role, plan_placement(role, config, nodes), nodes)
        except BaseException:  # Ray must be shut down after any error
            await cluster.close()
            raise
        log(f"Ray: {len(nodes)} node(s), {', '.join(sorted(node.host for node in nodes))}")
        return cluster

    async def nodes(self) -> list[ClusterNode]:
        try:
            async with asyncio.timeout(HEAD_ANSWER_SECONDS):
                return parse_nodes(await run_in_daemon_thread(self._ray.nodes))
        except TimeoutError as error:
            raise InstarError(
                f"the head node of the Ray cluster did not answer within {HEAD_ANSWER_SECONDS:g} s; check "
                "that it is running"
            ) from error

    @property
    def roles(self) -> Mapping[str, RoleActor]:
        return self._actors

    def describe_listen_host(self, host: str) -> str:
        return "the address of its node" if is_loopback(host) and not self._is_single_machine else host

    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RoleActor:
        name = options.get("name") or role
        if (previous := self._actors.get(name)) is not None:
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
        actor = RoleActor(role, name, spec=spec)
        actor.host = previous.host if previous else self._read_hosts().get(name, "")
        self._actors[name] = actor
        await self._place(actor)
        self._start_watcher(actor, self._watch(actor))
        return actor

    async def _place(self, actor: RoleActor) -> None:
        """Create the actor on a node with free resources, and start its role. Raises InstarError if there is
        no such node or the role cannot start. If the role is told to exit during this, mark it as exited."""
        reason = ""
        for _ in range(MAX_PLACEMENT_ATTEMPTS):
            await self._create(actor)
            assert actor.spec is not None
            try:
                placed: PlacedRole = await self._ask(actor.handle.start.remote(actor.spec), PLACEMENT_SECONDS)
            except InstarError as error:
                self._kill_actor(actor)
                # Ray adds text to the message; `cause` is the error that the actor raised.
                raise InstarError(f"{actor.name}: {getattr(error, 'cause', None) or error}") from error
            except (ActorLostError, TimeoutError) as error:
                reason = str(error) or f"no node had free resources within {PLACEMENT_SECONDS:g} s"
                self._kill_actor(actor)
                if self._end_if_stopping(actor):
                    return
                await self._renew_lease(actor)  # the role may have started even though no answer arrived
                continue
            actor.host, actor.node_id = placed.host, placed.node_id
            actor.url, actor.log, actor.shares_folder = placed.url, placed.log, placed.shares_folder
            actor.placed_at, actor.generation = time.monotonic(), 1
            hosts = {**self._read_hosts(), actor.name: actor.host}
            scratch = self._hosts_file.with_suffix(".partial")
            scratch.write_bytes(msgspec.json.encode(hosts))
            scratch.replace(self._hosts_file)
            self._end_if_stopping(actor)
            return
        resources = requested_resources(plan_placement(actor.role, self.config, await self.nodes()))
        raise InstarError(f"{actor.name} cannot be placed on the Ray cluster (needs {resources}): {reason}")

    async def _create(self, actor: RoleActor) -> None:
        nodes = await self.nodes()
        placement = plan_placement(actor.role, self.config, nodes)
        options: dict[str, Any] = {
            "num_cpus": placement.cpus,
            "num_gpus": placement.gpus,
            "resources": placement.resources,
            "max_restarts": 0,  # a restarted actor would have no state, so a new actor is created
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        if (node := self._required_node(actor, nodes)) is not None:
            affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = affinity(node.node_id, soft=False)
        elif unreachable := self._unreachable_nodes & {node.node_id for node in nodes}:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(unreachable))})"}
        actor.handle = self._ray.remote(RoleHost).options(**options).remote()

    def _required_node(self, actor: RoleActor, nodes: list[ClusterNode]) -> ClusterNode | None:
        """Return the node that the actor must run on, or None if it may run on any node. If the store is a
        file, all actors run on the node of this process. A trainer stays on the node that has its
        checkpoints, if that node is reachable."""
        if isinstance(self.config.store, SqliteStoreConfig):
            this_node = self._ray.get_runtime_context().get_node_id()
            return next((node for node in nodes if node.node_id == this_node), None)
        if actor.role != "trainer" or not actor.host:
            return None
        reachable = (node for node in nodes if node.node_id not in self._unreachable_nodes)
        return next((node for node in reachable if node.host == actor.host), None)

    def _read_hosts(self) -> dict[str, str]:
        """Return the last host of each role, including hosts from earlier starts of this run."""
        return msgspec.json.decode(self._hosts_file.read_bytes()) if self._hosts_file.is_file() else {}

    async def _watch(self, actor: RoleActor) -> None:
        """Follow the actor until this process kills it, and move the role if the actor is lost. The actor
        outlives its role, so that the socket stays open and the log can be read."""
        while actor.handle is not None:
            try:
                await self._follow(actor)
            except ActorLostError as lost:
                try:
                    await self._move(actor, str(lost))
                except InstarError as error:
                    self._set_exit_code(actor, EXIT_LOST)
                    self.fail(error)

    async def _follow(self, actor: RoleActor) -> None:
        """Handle the actor's reports until this process kills it. Raises ActorLostError if it is lost."""
        last_report = time.monotonic()
        timeout = min(ANSWER_SECONDS, self._section.node_timeout / 3)
        while actor.handle is not None:
            try:
                report: RoleReport = await self._ask(actor.handle.report.remote(), timeout)
                await self._handle_report(actor, report)
            except TimeoutError as error:
                silent_seconds = time.monotonic() - last_report
                if silent_seconds > self._section.node_timeout:
                    self._unreachable_nodes.add(actor.node_id)
                    raise ActorLostError(f"no report from {actor.host} for {silent_seconds:.0f} s") from error
                continue
            last_report = time.monotonic()
            self._unreachable_nodes.discard(actor.node_id)
            await asyncio.sleep(REPORT_INTERVAL_SECONDS)

    async def _handle_report(self, actor: RoleActor, report: RoleReport) -> None:
        for event in report.events:
            self.log(event)
        actor.restarts = actor.moves + report.restarts
        handle = actor.handle  # the actor that sent the report; the role may move during the wait below
        if handle is not None and not actor.shares_folder and actor.role in ("trainer", "rollout"):
            await self._metrics.fetch(
                actor.host, lambda offset: self._ask(handle.read_metrics.remote(offset), ANSWER_SECONDS)
            )
        if report.failure is not None:
            self.fail(InstarError(report.failure))
        if report.exit_code is not None and report.generation >= actor.generation:
            self._set_exit_code(actor, report.exit_code)

    async def _move(self, actor: RoleActor, reason: str) -> None:
        self._kill_actor(actor)
        if self._end_if_stopping(actor) or actor.exit_code.done():
            return
        if time.monotonic() - actor.placed_at > RESTART_RESET_SECONDS:
            actor.moves = 0
        if actor.moves >= len(RESTART_BACKOFF):
            loss = f"{actor.name} was lost {actor.moves + 1} times in a row and will not be restarted"
            raise InstarError(f"{loss}; last reason: {reason}\n(log: {actor.log})")
        self.log(f"{actor.name} was lost ({reason}); restarting it on a node with free resources")
        await asyncio.sleep(RESTART_BACKOFF[actor.moves])
        actor.moves += 1
        if not self._end_if_stopping(actor):
            await self._replace(actor)

    async def _replace(self, actor: RoleActor) -> None:
        """Create a new actor for the role. A new lease prevents the previous actor from writing to the
        store."""
        await self._renew_lease(actor)
        await self._place(actor)
        if actor.handle is not None and actor.url:
            await self._directory.register(actor)

    async def _renew_lease(self, actor: RoleActor) -> None:
        assert actor.spec is not None
        lease = await self._directory.take_lease(actor.name)
        actor.spec = replace(actor.spec, env={**actor.spec.env, LEASE_ENV: lease})

    def _end_if_stopping(self, actor: RoleActor) -> bool:
        """If the role was told to exit while it was lost or being placed, mark it as exited and return
        True."""
        if actor.is_stopping:
            self._kill_actor(actor)
            self._set_exit_code(actor, EXIT_LOST)
        return actor.is_stopping

    def _set_exit_code(self, actor: RoleActor, code: int) -> None:
        if not actor.exit_code.done():
            actor.exit_code.set_result(code)

    def _kill_actor(self, actor: RoleActor) -> None:
        handle, actor.handle = actor.handle, None
        if handle is not None:
            self._ray.kill(handle)

    async def _ask(self, answer: Any, seconds: float) -> Any:
        """Await an actor's answer. Raises ActorLostError if the actor has exited, TimeoutError if it cannot
        be reached or does not answer within ``seconds``, and any error that the actor raised."""
        errors = self._ray.exceptions
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except errors.ActorUnavailableError as error:
            await asyncio.sleep(REPORT_INTERVAL_SECONDS)
            raise TimeoutError from error
        except errors.RayTaskError:
            raise  # the actor's own code raised this error
        except errors.RayError as error:
            raise ActorLostError(str(error).strip().splitlines()[0]) from error

    def signal(self, name: str, signum: int = signal.SIGTERM) -> None:
        if (actor := self._actors.get(name)) is not None:
            actor.is_stopping = True
            if actor.handle is not None:
                actor.handle.signal.remote(signum)

    def kill(self, name: str) -> None:
        if (actor := self._actors.get(name)) is not None:
            actor.is_stopping = True
            if actor.handle is not None and not actor.exit_code.done():
                actor.handle.kill.remote()
            self._set_exit_code(actor, EXIT_LOST)

    async def restart(self, name: str, timeout: float = 10.0) -> None:
        actor = self._actors[name]
        actor.is_stopping = False
        if actor.handle is None:
            await self._replace(actor)
            if self._end_if_stopping(actor):
                return
            self._start_watcher(actor, self._watch(actor))
        else:
            try:
                actor.generation = await self._ask(
                    actor.handle.restart.remote(timeout), timeout + ANSWER_SECONDS
                )
            except (ActorLostError, TimeoutError) as error:
                raise InstarError(
                    f"{name} cannot be restarted: its actor on {actor.host} has exited or does not answer"
                ) from error
        if actor.exit_code.done():
            actor.exit_code = asyncio.get_running_loop().create_future()

    async def tail(self, name: str, lines: int = 12) -> str:
        actor = self._actors[name]
        if actor.handle is None:
            return ""
        try:
            return await self._ask(actor.handle.tail.remote(lines), ANSWER_SECONDS)
        except (ActorLostError, TimeoutError):
            return ""

    async def close(self) -> None:
        await super().close()
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                await run_in_daemon_thread(self._ray.shutdown)
        except TimeoutError:  # Ray exits with this process, and the result of the run matters more
            self.log(f"Ray did not shut down within {SHUTDOWN_SECONDS:g} s")
