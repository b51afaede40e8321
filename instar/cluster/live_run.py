"""A run in progress: starts and stops its roles, and gives access to its store and keys."""

from __future__ import annotations

import asyncio
import difflib
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Unpack

from instar.async_utils import gather_or_cancel
from instar.backends.resolve import RunSecrets, extract_secrets, resolve_run
from instar.cluster.adapter import make_initial_policy, prepare_adapter
from instar.cluster.base import Cluster, ListenAddress, RoleHandle, RoleOptions
from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV, VERSION_ENV
from instar.cluster.context_length import resolve_context
from instar.cluster.control import RoleController, serve_control_socket
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.interrupts import Interrupts, handle_interrupts
from instar.cluster.layout import (
    RunFolder,
    engine_names,
    engine_process_config,
    engine_python,
    public_settings,
    teacher_config,
    teacher_names,
)
from instar.cluster.supervisor import LEASE_ENV, Supervisor
from instar.cluster.tasks import cancel_tasks
from instar.cluster.versions import find_policy
from instar.config import CloudEngineConfig, RunConfig
from instar.engines.base import Engine, EngineStatus
from instar.engines.factory import connect_engines
from instar.errors import ConfigError, EngineUnavailable, InstarError
from instar.gateway.auth import resolve_admin_key
from instar.rewards.factory import create_background_scorers
from instar.store.base import KeyRow, Run, Store
from instar.store.factory import open_store
from instar.types import Policy, PolicyRef
from instar.umask import PRIVATE_UMASK, USER_UMASK, USER_UMASK_ENV, use_umask

REWARDS = "rewards"
STATUS_TIMEOUT_SECONDS = 5.0
Phase = Literal["starting", "initial evaluation", "training", "final evaluation", "stopping", "done"]


@dataclass
class LiveRun:
    config: RunConfig
    folder: RunFolder
    cluster: Cluster
    control: RoleController
    store: Store
    engine_token: str = field(repr=False)
    admin_key: str = field(repr=False)
    secrets: RunSecrets = field(repr=False)
    interrupts: Interrupts = field(default_factory=Interrupts)
    version: PolicyRef | None = None
    """The policy version to serve, or None for the newest."""
    engine: Engine | None = None
    connected_urls: list[str] = field(default_factory=list[str])
    """The URLs of the engines to which ``engine`` is connected."""
    phase: Phase = "starting"
    started_at: float = field(default_factory=time.monotonic)
    is_stopped_by_user: bool = False
    watchers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    """Tasks that observe the run and are cancelled before the cluster and the store are closed."""

    @property
    def run_id(self) -> str:
        return self.config.name

    @property
    def engine_urls(self) -> list[str]:
        return [handle.url for handle in self.cluster.roles.values() if handle.role == "engine"]

    @property
    def gateway_url(self) -> str:
        return self.cluster.roles["gateway"].url

    @property
    def env(self) -> dict[str, str]:
        return {
            ADMIN_KEY_ENV: self.admin_key,
            ENGINE_TOKEN_ENV: self.engine_token,
            VERSION_ENV: "" if self.version is None else str(self.version),
            USER_UMASK_ENV: f"{USER_UMASK:o}",
            "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not take cores from other roles
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def judge_key_variables(self) -> set[str]:
        """The environment variables with the API keys of judges, which agents must not see."""
        names = (getattr(section, "api_key_env", None) for section in self.config.reward)
        return {name for name in names if name}


@asynccontextmanager
async def serve_run(
    config: RunConfig,
    *,
    resume: bool = False,
    live: bool = True,
    version: PolicyRef | None = None,
    keep_sessions: bool = False,
    log: Callable[[str], None] = print,
) -> AsyncGenerator[LiveRun]:
    """Start the engines, the gateway and, if needed, the rewards role, yield the run, and finally stop all
    roles. ``live`` must be True if clients outside the run open sessions, so that these are scored, and are
    completed at the end unless ``keep_sessions`` is True. The engines then serve ``version``, by default the
    newest. Ctrl-C cancels startup and the block, unless the block sets ``interrupts.on_first_signal``."""
    config, notes = resolve_run(config, os.environ)
    for note in notes:
        log(note)
    needs_rewards = create_background_scorers(config).are_needed(serves_live=live)
    config, run_secrets = extract_secrets(config, os.environ)
    folder = RunFolder(config.run_dir.resolve())
    config = config.model_copy(update={"dir": folder.path})
    _check_folder(folder, resume)
    config = resolve_context(config, folder, log)
    async with AsyncExitStack() as resources:
        interrupts = resources.enter_context(handle_interrupts())
        resources.enter_context(use_umask(PRIVATE_UMASK))
        resources.callback(os.close, folder.lock("supervisor", timeout=2.0))
        if message := folder.make_private():
            log(message)
        store = open_store(config)
        resources.push_async_callback(store.close)
        if not resume:
            await _check_name(config, store)
        if live and engine_names(config):
            await _check_version(config, store, version)
        config = await _create_run(config, folder, store, resume, log)
        if live and not keep_sessions:
            # Called after the gateway has stopped and before the store is closed.
            resources.push_async_callback(_complete_open_sessions, config, store)
        cluster = await _create_cluster(config, folder, store, log)
        resources.push_async_callback(cluster.close)
        interrupts.kill = lambda: [cluster.kill(name) for name in cluster.roles]
        control = RoleController(cluster, store, config.name)
        await resources.enter_async_context(serve_control_socket(control, folder.control_socket))
        listen_host = cluster.describe_listen_host(config.gateway.host)
        run = LiveRun(
            config=config,
            folder=folder,
            cluster=cluster,
            control=control,
            store=store,
            engine_token=secrets.token_urlsafe(24),
            admin_key=resolve_admin_key(os.environ, ADMIN_KEY_ENV, listen_host),
            secrets=run_secrets,
            interrupts=interrupts,
            version=version,
        )
        resources.push_async_callback(_stop_watchers, run)
        await _start_serving(run, needs_rewards)
        yield run
    run.phase = "done"


async def _create_run(
    config: RunConfig, folder: RunFolder, store: Store, resume: bool, log: Callable[[str], None]
) -> RunConfig:
    """Write the run's config and adapter to its folder, and register the run. Return its config."""
    if config.trains_on_live and await store.steps(config.name):
        raise ConfigError(
            "data: 'live' trains a policy for each learning agent, but this run already trained one for all "
            "agents. Start a new run under a different `name`, which can continue from its weights with "
            f"model.adapter: run:{config.name}"
        )
    config = await prepare_adapter(config, folder, resume=resume, log=log)
    folder.create(config)
    await _register_run(config, store, log)
    return config


async def _start_serving(run: LiveRun, needs_rewards: bool) -> None:
    engine_starts = [
        _start_with_secrets(run, "engine", name, engine_python(engine_process_config(run.config, index)))
        for index, name in enumerate(engine_names(run.config))
    ]
    listen = (run.config.gateway.host, run.config.gateway.port)
    await gather_or_cancel([*engine_starts, start_role(run, "gateway", env=run.env, listen=listen)])
    await _wait_until_up(run, "engine", "gateway")
    if needs_rewards:
        withheld = run.secrets.withheld_variables - run.judge_key_variables
        await start_role(run, REWARDS, env=run.env, exclude_env=withheld)


def _check_folder(folder: RunFolder, resume: bool) -> None:
    exists = folder.config_file.is_file()
    if exists and not resume:
        raise ConfigError(
            f"The run folder {folder.path} already exists. Continue the run with --resume, or start a new "
            "run under a different `name`."
        )
    if resume and not exists:
        raise ConfigError(f"--resume: there is no run in {folder.path}; start it without --resume")


async def _check_version(config: RunConfig, store: Store, version: PolicyRef | None) -> None:
    """Raise ConfigError if the version, by default the newest one, cannot be served."""
    if version is None:
        await find_policy(store, config.name)
    else:
        await find_policy(store, version.policy_id, version.version)


async def _check_name(config: RunConfig, store: Store) -> None:
    if await store.run(config.name) is not None:  # several folders may share a store
        raise ConfigError(
            f"name: the store already has a run named {config.name!r}. Continue it with --resume from its "
            "folder, or start a new run under a different `name`."
        )


def describe_agents_without_key(config: RunConfig, keys: Sequence[KeyRow]) -> list[str]:
    """Return a message for each agent in `agents` that has no active key, so that a wrong name is noticed.
    The run's own agent needs no key: it also owns sessions that are opened with the admin key."""
    names = sorted({key.agent_id for key in keys if key.agent_id is not None and key.revoked_at is None})
    messages: list[str] = []
    for name in config.agents:
        if name not in names and name != config.agent_id:
            similar = difflib.get_close_matches(name, [*names, config.agent_id], n=1)
            hint = f" (did you mean {similar[0]!r}?)" if similar else ""
            messages.append(
                f"agents.{name}: no active API key belongs to this agent{hint}; create one with "
                f"`instar keys create {config.run_dir} --agent {name}`. Agents with keys: "
                f"{', '.join(names) or 'none'}"
            )
    return messages


async def _create_cluster(
    config: RunConfig, folder: RunFolder, store: Store, log: Callable[[str], None]
) -> Cluster:
    if config.cluster.type == "ray":
        from instar.cluster.ray.cluster import RayCluster

        return await RayCluster.connect(config, folder, EndpointDirectory(store, config.name), log=log)
    return Supervisor(folder, log=log)


async def _register_run(config: RunConfig, store: Store, log: Callable[[str], None]) -> None:
    for message in describe_agents_without_key(config, await store.keys()):
        log(message)
    existing = await store.run(config.name)
    created_at = existing.created_at if existing else 0
    await store.put_run(Run(config.name, config.name, public_settings(config), created_at=created_at))
    if (initial := make_initial_policy(config)) is not None:
        for policy_id in dict.fromkeys([config.name, *config.policy_ids]):
            policy = Policy(policy_id, initial.version, initial.artifact)
            await store.put_initial_policy(policy, config.name)
    # The stored endpoints are from an earlier process. A finished rollout among them must not end this run.
    for endpoint in await store.endpoints(config.name):
        await store.remove_endpoint(config.name, endpoint.role, endpoint.name)


async def _complete_open_sessions(config: RunConfig, store: Store) -> None:
    session_ids = await store.list_idle_sessions(config.name, before=math.inf)
    await store.complete_sessions(session_ids, "the gateway was stopped")


async def _stop_watchers(run: LiveRun) -> None:
    run.phase = "stopping"
    await cancel_tasks(run.watchers)
    if run.engine is not None:
        await run.engine.close()


async def start_role(run: LiveRun, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RoleHandle:
    """Start a role under a new lease, and register its address in the store if it listens."""
    lease = await run.store.take_lease(run.run_id, options.get("name") or role)
    options["env"] = {**options.get("env", {}), LEASE_ENV: str(lease)}
    handle = await run.cluster.start(role, *arguments, **options)
    if handle.url:
        await EndpointDirectory(run.store, run.run_id).register(handle)
    return handle


async def start_trainer(run: LiveRun) -> None:
    await _start_with_secrets(run, "trainer", "trainer", run.config.backend.python, listen=None)


async def start_gate(run: LiveRun) -> None:
    withheld = run.secrets.withheld_variables - run.judge_key_variables
    await start_role(run, "gate", env=run.env, exclude_env=withheld)


async def start_rollout(run: LiveRun, *arguments: str) -> None:
    withheld = {*run.secrets.withheld_variables, *run.judge_key_variables}
    await start_role(run, "rollout", *arguments, env=run.env, exclude_env=withheld)


async def start_teacher(run: LiveRun) -> None:
    """Start the teacher's processes, if the teacher is an engine, and wait until they respond."""
    for index, name in enumerate(teacher_names(run.config)):
        teacher = engine_process_config(teacher_config(run.config), index)
        is_cloud = isinstance(teacher.engine, CloudEngineConfig)
        await _start_with_secrets(
            run, "teacher", name, run.config.backend.python if is_cloud else engine_python(teacher)
        )
    await _wait_until_up(run, "teacher")


async def _start_with_secrets(
    run: LiveRun, role: str, name: str, python: str | None, listen: ListenAddress | None = ("127.0.0.1", 0)
) -> RoleHandle:
    """Start a role that needs the keys of cloud services."""
    return await start_role(
        run,
        role,
        name=name,
        python=python,
        env={**run.env, **run.secrets.env},
        exclude_env=run.secrets.withheld_variables,
        listen=listen,
    )


async def _wait_until_up(run: LiveRun, *roles: str, timeout: float = 600.0) -> None:
    """Wait until all processes of the ``roles`` respond. Raises InstarError after ``timeout`` seconds."""
    import aiohttp

    deadline = time.monotonic() + timeout
    async with aiohttp.ClientSession() as client:
        for handle in [handle for handle in run.cluster.roles.values() if handle.role in roles]:
            while True:
                run.cluster.raise_failure()
                try:
                    # The socket is open before the role is ready, so an early request waits in its queue.
                    async with client.get(
                        f"{handle.url}/healthz", timeout=aiohttp.ClientTimeout(1.0)
                    ) as response:
                        if response.status == 200:
                            break
                except (aiohttp.ClientError, TimeoutError):
                    pass
                if time.monotonic() > deadline:
                    role = f"{handle.name} ({handle.url})"
                    raise InstarError(f"{role} did not respond within {timeout:g} s; see {handle.log}")
                await asyncio.sleep(0.1)


async def fetch_engine_status(run: LiveRun) -> EngineStatus | None:
    """Return the combined status of the engines, or None if there are no engines or none of them responds."""
    urls = run.engine_urls
    if not urls:
        return None
    try:
        if run.engine is not None and run.connected_urls != urls:
            outdated, run.engine = run.engine, None
            await outdated.close()
        async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
            if run.engine is None:
                run.engine = await connect_engines(urls, run.engine_token, timeout=STATUS_TIMEOUT_SECONDS)
                run.connected_urls = urls
            return await run.engine.status()
    except (EngineUnavailable, TimeoutError):
        return None
