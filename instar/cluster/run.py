"""A whole run: its roles on a cluster, evaluation before and after, the end."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

from instar.backends.factory import check_run
from instar.backends.resolve import RunSecrets, extract_secrets, resolve_run
from instar.cluster.base import Cluster, RoleHandle, RoleOptions
from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV, HEARTBEAT_SECONDS
from instar.cluster.control import RoleController, serve_control_socket
from instar.cluster.data import import_data, pin_data
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.factory import create_cluster
from instar.cluster.layout import (
    RunFolder,
    engine_names,
    engine_process_config,
    engine_python,
    public_settings,
    teacher_config,
    teacher_names,
)
from instar.cluster.scoring import ROLE as REWARDS
from instar.cluster.scoring import judge_key_variables
from instar.cluster.supervisor import LEASE_ENV
from instar.config import (
    CloudConfig,
    CloudEngineConfig,
    EngineReferenceConfig,
    RunConfig,
    UpstreamEngineConfig,
)
from instar.engines.base import Engine, EngineStatus
from instar.engines.factory import connect_engines
from instar.errors import ConfigError, EngineUnavailable, InstarError
from instar.gateway.auth import resolve_admin_key
from instar.rewards.factory import create_background_scorers
from instar.rewards.runner import IDLE_STATUS
from instar.store.base import Run, Store
from instar.store.factory import open_store
from instar.trainer.monitor import read_metrics

SCORING_SECONDS = 120.0
"""That a run which is done waits for scores that nothing depends on."""
Phase = Literal["starting", "evaluating before", "training", "evaluating after", "stopping", "done"]


@dataclass
class LiveRun:
    """A run under way, as the display sees it."""

    config: RunConfig
    folder: RunFolder
    cluster: Cluster
    control: RoleController
    store: Store
    engine_token: str = field(repr=False)
    admin_key: str = field(repr=False)
    secrets: RunSecrets = field(repr=False)
    engine: Engine | None = None
    engine_at: list[str] = field(default_factory=list[str])
    """Where the engines were when ``engine`` was connected."""
    phase: Phase = "starting"
    started: float = field(default_factory=time.monotonic)
    stopped_by_user: bool = False
    watchers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    """Tasks that look at the run; ended before what they look at is closed."""

    @property
    def run_id(self) -> str:
        return self.config.name

    def urls(self, role: str) -> list[str]:
        """Where the processes of a role are now."""
        return [found.url for found in self.cluster.roles.values() if found.role == role]

    @property
    def engine_urls(self) -> list[str]:
        return self.urls("engine")

    @property
    def gateway_url(self) -> str:
        (url,) = self.urls("gateway")
        return url


@asynccontextmanager
async def serve_run(
    config: RunConfig, *, resume: bool = False, live: bool = True, log: Callable[[str], None] = print
) -> AsyncGenerator[LiveRun]:
    """Engines and gateway up, all answering; everything is stopped on leaving. ``live``: it is there for live
    sessions, which are scored as well."""
    config, notes = resolve_run(config, os.environ)
    for note in notes:
        log(note)
    scored = create_background_scorers(config).are_needed(live=live)
    config, keys = extract_secrets(config, os.environ)
    folder = RunFolder(config.run_dir.resolve())
    config = config.model_copy(update={"dir": folder.path})
    _check_folder(folder, config, resume)
    async with AsyncExitStack() as leaving:
        leaving.callback(os.close, folder.lock("supervisor", wait=2.0))
        store = open_store(config)
        leaving.push_async_callback(store.close)
        if not resume:
            await _check_name(config, store)
        folder.create(config)
        await _enter_run(config, store)
        cluster = await create_cluster(config, folder, EndpointDirectory(store, config.name), log=log)
        leaving.push_async_callback(cluster.close)
        control = RoleController(cluster, store, config.name)
        await leaving.enter_async_context(serve_control_socket(control, folder.control_socket))
        run = LiveRun(
            config=config,
            folder=folder,
            cluster=cluster,
            control=control,
            store=store,
            engine_token=secrets.token_urlsafe(24),
            admin_key=resolve_admin_key(
                os.environ, ADMIN_KEY_ENV, cluster.describe_listen_host(config.gateway.host)
            ),
            secrets=keys,
        )
        leaving.push_async_callback(_stop_watching, run)
        gateway = config.gateway
        await _at_once(
            *(
                _start_engine(run, "engine", name, engine_python(engine_process_config(config, place)))
                for place, name in enumerate(engine_names(config))
            ),
            start_role(run, "gateway", env=role_environment(run), listen=(gateway.host, gateway.port)),
        )
        await _until_up(run, "engine", "gateway")
        if scored:
            await start_role(
                run,
                REWARDS,
                env=role_environment(run),
                exclude_env=run.secrets.withheld - judge_key_variables(config),
            )
        yield run
    run.phase = "done"


async def _check_name(config: RunConfig, store: Store) -> None:
    """A store may hold the runs of many folders."""
    if await store.run(config.name) is not None:
        raise ConfigError(
            f"name: given {config.name!r}; the store has a run of that name already. Continue it with "
            "--resume from its folder, or give this one another name"
        )


async def _enter_run(config: RunConfig, store: Store) -> None:
    known = await store.run(config.name)
    await store.put_run(
        Run(
            config.name,
            config.name,
            public_settings(config),
            created_at=known.created_at if known else 0,
        )
    )
    for left in await store.endpoints(config.name):
        # Of an earlier process. That its rollout had finished says nothing of this one's.
        await store.remove_endpoint(config.name, left.role, left.name)


async def _stop_watching(run: LiveRun) -> None:
    run.phase = "stopping"
    for watcher in run.watchers:
        watcher.cancel()
    await asyncio.gather(*run.watchers, return_exceptions=True)
    if run.engine is not None:
        await run.engine.close()


async def start_role(run: LiveRun, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RoleHandle:
    """Start a role, in the place of any that had its name before, and let the others know where it is."""
    lease = await run.store.take_lease(run.run_id, options.get("name") or role)
    options["env"] = {**options.get("env", {}), LEASE_ENV: str(lease)}
    started = await run.cluster.start(role, *arguments, **options)
    if started.url:
        await EndpointDirectory(run.store, run.run_id).register(started)
    return started


async def _at_once(*starts: Coroutine[Any, Any, object]) -> None:
    """The first that fails ends the others."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start_engine(run: LiveRun, role: str, name: str, python: str | None) -> None:
    """One process of the engine, or of the teacher."""
    await start_role(
        run,
        role,
        name=name,
        python=python,
        env={**role_environment(run), **run.secrets.env},
        exclude_env=run.secrets.withheld,
        listen=("127.0.0.1", 0),
    )


def _check_folder(folder: RunFolder, config: RunConfig, resume: bool) -> None:
    there = folder.config_file.is_file()
    if there and not resume:
        raise ConfigError(
            f"the run folder {folder.path} exists. Continue it with --resume, or give the run another name"
        )
    if resume and not there:
        raise ConfigError(f"nothing to resume: there is no run in {folder.path}")


def role_environment(run: LiveRun) -> dict[str, str]:
    """What roles are told by the environment: keys. Threads that wait must not burn the cores that other
    roles compute on."""
    return {
        ADMIN_KEY_ENV: run.admin_key,
        ENGINE_TOKEN_ENV: run.engine_token,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


async def _start_teacher(run: LiveRun) -> None:
    """Where an engine is one. It ends with the run's other roles."""
    for place, name in enumerate(teacher_names(run.config)):
        await _start_engine(run, "teacher", name, _teacher_python(run.config, place))
    await _until_up(run, "teacher")


def _teacher_python(config: RunConfig, place: int) -> str | None:
    teacher = engine_process_config(teacher_config(config), place)
    return config.backend.python if isinstance(teacher.engine, CloudEngineConfig) else engine_python(teacher)


async def _until_up(run: LiveRun, *roles: str, timeout: float = 600.0) -> None:
    """Until every process of these roles answers."""
    import aiohttp

    deadline = time.monotonic() + timeout
    async with aiohttp.ClientSession() as client:
        for found in [found for found in run.cluster.roles.values() if found.role in roles]:
            while True:
                run.cluster.raise_failure()
                try:
                    # The socket is open from the start, so an early request waits in its queue.
                    async with client.get(
                        f"{found.url}/healthz", timeout=aiohttp.ClientTimeout(1.0)
                    ) as answer:
                        if answer.status == 200:
                            break
                except (aiohttp.ClientError, TimeoutError):
                    pass
                if time.monotonic() > deadline:
                    raise InstarError(
                        f"{found.name} ({found.url}) did not answer within {timeout:.0f} s; see {found.log}"
                    )
                await asyncio.sleep(0.1)


async def train(
    config: RunConfig,
    *,
    resume: bool = False,
    on_started: Callable[[LiveRun], Any] | None = None,
    log: Callable[[str], None] = print,
) -> LiveRun:
    """Run it to its end. ``observe`` is called once everything is up. Raises the first cause when the run
    cannot go on; on Ctrl-C it drains, checkpoints and returns with ``stopped_by_user`` set."""
    _check_data(config)
    if not engine_names(config):
        raise ConfigError("engine.type: an upstream is recorded, not trained; use local to train")
    config, notes = check_run(config, os.environ)
    for note in notes:
        log(note)
    _check_teacher(config)
    if resume:
        _check_backend(config)
    folder = RunFolder(config.run_dir.resolve())
    before = folder.read_config().data if resume and folder.config_file.is_file() else ()
    config = await pin_data(config, before)
    async with serve_run(config, resume=resume, live=False, log=log) as run:
        if on_started is not None:
            on_started(run)
        try:
            await import_data(run.store, run.config, log)
            await _start_teacher(run)
            stop = _interrupts(run)
            await _phases(run, stop)
            await _end_scoring(run, stop)
            run.stopped_by_user = stop.is_set()
        except Exception as error:  # of whatever kind: the run is over by it, and its store says so
            await _note_failure(run, error)
            if isinstance(error, OSError):  # of the machine, not of the code
                raise InstarError(str(error)) from error
            raise
        await _finish(run, "stopped" if run.stopped_by_user else "finished")
        return run


def _check_data(config: RunConfig) -> None:
    if config.rollout is not None:
        return
    if any(each.is_live for each in config.data):
        raise ConfigError(
            "rollout: needed to train; name the tasks and the agent that tries them, or train on exported "
            "data alone (data: dataset:NAME)"
        )
    if config.eval is not None:
        raise ConfigError("rollout: needed to evaluate; its agent tries the held-out tasks")


def _check_teacher(config: RunConfig) -> None:
    section = config.trainer.reference
    if not isinstance(section, EngineReferenceConfig) or section.weight == 0:
        return
    if isinstance(section.engine, UpstreamEngineConfig):
        raise ConfigError(
            "trainer.reference.engine.type: an upstream does not tell the logprobs of given tokens; use "
            "trainer.reference.type: completions where it does"
        )
    if isinstance(section.engine, CloudEngineConfig) and not isinstance(config.backend, CloudConfig):
        raise ConfigError(
            f"trainer.reference.engine.type: cloud is at the service that trains, and backend.type is "
            f"{config.backend.type!r}; use local"
        )


def _check_backend(config: RunConfig) -> None:
    """A saved state is of use to the backend that wrote it only; `auto` may mean another one by now."""
    folder = RunFolder(config.run_dir.resolve())
    if folder.config_file.is_file() and (before := folder.read_config().backend.type) != config.backend.type:
        raise ConfigError(
            f"backend.type: this run was trained by {before}, and now it would be {config.backend.type}; "
            "name the one before, or give the run another name"
        )


async def _phases(run: LiveRun, stop: asyncio.Event) -> None:
    plan = run.config.eval
    if plan and plan.at_start and await _is_untrained(run) and not _evaluated(run, "before"):
        run.phase = "evaluating before"
        await _evaluate(run, "before", stop)
    if not stop.is_set():
        run.phase = "training"
        await _train(run, stop)
    if plan and plan.at_end and not stop.is_set():
        run.phase = "evaluating after"
        await _evaluate(run, "after", stop)


async def _train(run: LiveRun, stop: asyncio.Event) -> None:
    """The trainer's end is the end of training, unless a person ended it: rollout, if it still runs, is
    stopped then."""
    cluster = run.cluster
    secrets = run.secrets
    starts = [
        start_role(
            run,
            "trainer",
            python=run.config.backend.python,
            env={**role_environment(run), **secrets.env},
            exclude_env=secrets.withheld,
        )
    ]
    if run.config.trains_live:
        starts.append(
            start_role(run, "rollout", env=role_environment(run), exclude_env=_kept_from_agents(run))
        )
    await _at_once(*starts)
    ended = asyncio.create_task(run.control.wait_for_exit("trainer"))
    try:
        if await _interrupted(run, ended, stop):
            cluster.signal("trainer")
        if (code := await ended) != 0:
            raise InstarError(
                f"trainer: ended with exit code {code} while stopping; its last steps may not be saved\n"
                f"(log: {cluster.roles['trainer'].log})\n{await cluster.tail('trainer')}"
            )
    finally:
        run.control.retire("trainer")
        run.control.retire("rollout")
        await cluster.stop("rollout")


async def _evaluate(run: LiveRun, label: str, stop: asyncio.Event) -> None:
    await start_role(
        run, "rollout", f"--evaluate={label}", env=role_environment(run), exclude_env=_kept_from_agents(run)
    )
    ended = asyncio.create_task(run.control.wait_for_exit("rollout"))
    if await _interrupted(run, ended, stop):
        await run.cluster.stop("rollout")
    await ended
    run.control.retire("rollout")


async def _interrupted(run: LiveRun, ended: asyncio.Task[int], stop: asyncio.Event) -> bool:
    """Whether the stop came before the end; then nothing is held any more."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if ended.done():
        return False
    run.control.release_all()
    return True


def _kept_from_agents(run: LiveRun) -> set[str]:
    return {*run.secrets.withheld, *judge_key_variables(run.config)}


async def _end_scoring(run: LiveRun, stop: asyncio.Event) -> None:
    """Let what is still to be scored be scored, for a while."""
    if REWARDS not in run.cluster.roles or stop.is_set():
        return
    deadline = time.monotonic() + SCORING_SECONDS
    await _pause(3 * HEARTBEAT_SECONDS, stop)  # what it said before the last session had ended is old by then
    while time.monotonic() < deadline and not stop.is_set():
        run.cluster.raise_failure()
        told = [e.doing for e in await run.store.endpoints(run.run_id) if e.role == REWARDS]
        if not told or told[0].startswith(IDLE_STATUS) or run.cluster.roles[REWARDS].exit_code.done():
            return
        await _pause(HEARTBEAT_SECONDS, stop)
    run.cluster.log("some sessions are left without a score; --resume goes on with them")


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _is_untrained(run: LiveRun) -> bool:
    """A resumed run may be beyond its base model."""
    return (await run.store.progress(run.run_id)).head_version == 0


def _evaluated(run: LiveRun, label: str) -> bool:
    """Whether a resumed run has this evaluation already, in every mode."""
    assert run.config.eval is not None
    modes = {
        record["mode"]
        for record in read_metrics(run.folder.path)
        if record["kind"] == "eval" and record["label"] == label
    }
    return modes >= set(run.config.eval.modes)


def _interrupts(run: LiveRun) -> asyncio.Event:
    """The first Ctrl-C drains and checkpoints, the second stops at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if stop.is_set():
            for role in run.cluster.roles:
                run.cluster.kill(role)
            os._exit(130)
        run.cluster.log("stopping: the step under way is finished and saved (Ctrl-C again stops at once)")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    return stop


async def _note_failure(run: LiveRun, error: Exception) -> None:
    """As far as the store takes it: the first cause is the one to tell."""
    try:
        await _finish(run, "failed", str(error) or type(error).__name__)
    except (InstarError, OSError) as another:
        run.cluster.log(f"the run's failure could not be noted: {another}")


async def _finish(run: LiveRun, status: str, reason: str | None = None) -> None:
    known = await run.store.run(run.run_id)
    assert known is not None
    await run.store.put_run(
        Run(known.run_id, known.policy_id, known.config, status, reason, known.created_at)
    )


async def engine_status(run: LiveRun) -> EngineStatus | None:
    """What the engines report together; None while they cannot be asked, and where there are none."""
    urls = run.urls("engine")
    if not urls:
        return None
    try:
        if run.engine is not None and run.engine_at != urls:
            gone, run.engine = run.engine, None
            await gone.close()
        if run.engine is None:
            run.engine = await connect_engines(urls, run.engine_token, timeout=5)
            run.engine_at = urls
        return await run.engine.status()
    except EngineUnavailable:
        return None
