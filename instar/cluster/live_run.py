"""A run in progress: its cluster, store and keys, and the functions that start its roles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

from instar.backends.resolve import RunSecrets
from instar.cluster.base import Cluster, RoleHandle, RoleOptions
from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV
from instar.cluster.control import RoleController
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.layout import (
    RunFolder,
    engine_names,
    engine_process_config,
    engine_python,
    teacher_config,
    teacher_names,
)
from instar.cluster.supervisor import LEASE_ENV
from instar.cluster.tasks import cancel_tasks
from instar.config import CloudEngineConfig, RunConfig
from instar.engines.base import Engine, EngineStatus
from instar.engines.factory import connect_engines
from instar.errors import EngineUnavailable, InstarError
from instar.store.base import Store

REWARDS = "rewards"
Phase = Literal["starting", "evaluating before", "training", "evaluating after", "stopping", "done"]


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
    engine: Engine | None = None
    connected_urls: list[str] = field(default_factory=list[str])
    """The URLs of the engines when ``engine`` was connected."""
    phase: Phase = "starting"
    started: float = field(default_factory=time.monotonic)
    stopped_by_user: bool = False
    watchers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    """Tasks that observe the run; they are cancelled before its cluster and store are closed."""

    @property
    def run_id(self) -> str:
        return self.config.name

    def urls(self, role: str) -> list[str]:
        """The current URLs of the role's processes."""
        return [handle.url for handle in self.cluster.roles.values() if handle.role == role]

    @property
    def engine_urls(self) -> list[str]:
        return self.urls("engine")

    @property
    def gateway_url(self) -> str:
        (url,) = self.urls("gateway")
        return url

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that every role gets."""
        return {
            ADMIN_KEY_ENV: self.admin_key,
            ENGINE_TOKEN_ENV: self.engine_token,
            "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not take cores from other roles
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def judge_key_variables(self) -> set[str]:
        """The environment variables that hold keys of judges. The rewards role needs these variables; agents
        must not see them."""
        names = (getattr(section, "api_key_env", None) for section in self.config.reward)
        return {name for name in names if name}


async def start_role(run: LiveRun, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RoleHandle:
    """Start a role in place of any earlier role of that name, register its address and return it."""
    lease = await run.store.take_lease(run.run_id, options.get("name") or role)
    options["env"] = {**options.get("env", {}), LEASE_ENV: str(lease)}
    handle = await run.cluster.start(role, *arguments, **options)
    if handle.url:
        await EndpointDirectory(run.store, run.run_id).register(handle)
    return handle


async def start_trainer(run: LiveRun) -> None:
    await start_role(
        run,
        "trainer",
        python=run.config.backend.python,
        env={**run.env, **run.secrets.env},
        exclude_env=run.secrets.withheld,
    )


async def start_rollout(run: LiveRun, *arguments: str) -> None:
    withheld = {*run.secrets.withheld, *run.judge_key_variables}
    await start_role(run, "rollout", *arguments, env=run.env, exclude_env=withheld)


async def start_rewards(run: LiveRun) -> None:
    await start_role(run, REWARDS, env=run.env, exclude_env=run.secrets.withheld - run.judge_key_variables)


async def start_engines_and_gateway(run: LiveRun) -> None:
    gateway = run.config.gateway
    await run_together(
        *(
            _start_engine(run, "engine", name, engine_python(engine_process_config(run.config, index)))
            for index, name in enumerate(engine_names(run.config))
        ),
        start_role(run, "gateway", env=run.env, listen=(gateway.host, gateway.port)),
    )
    await _wait_until_up(run, "engine", "gateway")


async def start_teacher(run: LiveRun) -> None:
    """Start the teacher's processes if the teacher is an engine."""
    for index, name in enumerate(teacher_names(run.config)):
        await _start_engine(run, "teacher", name, _teacher_python(run.config, index))
    await _wait_until_up(run, "teacher")


def _teacher_python(config: RunConfig, index: int) -> str | None:
    teacher = engine_process_config(teacher_config(config), index)
    return config.backend.python if isinstance(teacher.engine, CloudEngineConfig) else engine_python(teacher)


async def _start_engine(run: LiveRun, role: str, name: str, python: str | None) -> None:
    await start_role(
        run,
        role,
        name=name,
        python=python,
        env={**run.env, **run.secrets.env},
        exclude_env=run.secrets.withheld,
        listen=("127.0.0.1", 0),
    )


async def run_together(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Wait for all coroutines. The first error cancels the other coroutines."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_until_up(run: LiveRun, *roles: str, timeout: float = 600.0) -> None:
    """Wait until every process of these roles answers."""
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
                    raise InstarError(
                        f"{handle.name} ({handle.url}) did not answer in {timeout:.0f} s; see {handle.log}"
                    )
                await asyncio.sleep(0.1)


async def stop_watchers(run: LiveRun) -> None:
    run.phase = "stopping"
    await cancel_tasks(run.watchers)
    if run.engine is not None:
        await run.engine.close()


async def engine_status(run: LiveRun) -> EngineStatus | None:
    """Return the combined status of the engines, or None if there are no engines or they do not answer."""
    urls = run.engine_urls
    if not urls:
        return None
    try:
        if run.engine is not None and run.connected_urls != urls:
            outdated, run.engine = run.engine, None
            await outdated.close()
        if run.engine is None:
            run.engine = await connect_engines(urls, run.engine_token, timeout=5)
            run.connected_urls = urls
        return await run.engine.status()
    except EngineUnavailable:
        return None
