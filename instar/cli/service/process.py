"""The process of the service: serves the gateway under the home's lock until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

import instar
from instar.cli.config_file import apply_overrides, load_config, validate
from instar.cli.model import fetch_served_model
from instar.cli.service.home import Home, ServiceSettings, choose_port, ensure_keys
from instar.cli.service.lock import Launch, ServiceLock, ServiceState
from instar.cli.service.logs import rotate_repeatedly
from instar.cluster.layout import RunFolder
from instar.cluster.live_run import LiveRun, serve_run
from instar.cluster.tasks import run_until_first
from instar.config import RunConfig, UpstreamEngineConfig
from instar.errors import ConfigError, InstarError
from instar.types import PolicyRef

PROVIDER_RUN_NAME = "providers"


def make_launch(file: Path | None, overrides: Sequence[str]) -> Launch:
    """Describe a start from the working directory. Raises ConfigError if an override contains a key, because
    the overrides are stored for a restart."""
    for path in (override.partition("=")[0] for override in overrides):
        if path.endswith("api_key"):
            raise ConfigError(
                f"--set {path}: the service stores its --set options, which must not contain a key; put the "
                f"key in an environment variable and name it in {path}_env"
            )
    config = str(file.absolute()) if file is not None else None
    return Launch(config=config, overrides=list(overrides), cwd=str(Path.cwd()))


def load_service_config(home: Home, launch: Launch) -> RunConfig:
    """Return the settings of the service: those of its YAML file, with a run in the home unless they say
    otherwise. Each model has its own run, because sessions cannot continue with the tokens of another one."""
    file = Path(launch.config) if launch.config is not None else home.config_file
    if launch.config is not None or file.is_file():
        config = load_config(file, launch.overrides)
    else:
        config = validate(apply_overrides({}, launch.overrides), "settings")
    if "name" not in config.model_fields_set:
        config = config.model_copy(update={"name": make_run_name(config)})
    if config.dir is None:
        config = config.model_copy(update={"dir": home.runs / config.name})
    _check_same_model(config)
    return config


def prepare_service(home: Home, launch: Launch, console: Console) -> RunConfig:
    """Return the settings of the service. Report errors in them, and download the model, where the user sees
    it."""
    config = load_service_config(home, launch)
    fetch_served_model(config, console)
    return config


def make_run_name(config: RunConfig) -> str:
    if isinstance(config.engine, UpstreamEngineConfig):
        return PROVIDER_RUN_NAME
    model = config.model.name
    if not model.startswith((".", "~", "/")):
        return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-._") or "model"
    folder = Path(model).expanduser().resolve()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-._") or "model"
    return f"{name}-{sha256(bytes(folder)).hexdigest()[:8]}"  # several folders may have the same name


def _check_same_model(config: RunConfig) -> None:
    file = RunFolder(config.run_dir).config_file
    if not file.is_file() or isinstance(config.engine, UpstreamEngineConfig):
        return
    # Not `RunFolder.read_config`, because an earlier version of Instar may have written the file.
    settings: Any = json.loads(file.read_bytes())
    previous = settings.get("model", {}).get("name")
    if previous not in (None, config.model.name):
        raise ConfigError(
            f"model.name: the run {config.name!r} has recorded sessions with {previous!r}, which "
            f"{config.model.name!r} cannot continue; set `name` to start a new run, or remove `name` to have "
            "one run for each model"
        )


async def run_service(
    home: Home,
    launch: Launch,
    config: RunConfig,
    *,
    log: Callable[[str], None],
    on_ready: Callable[[LiveRun, ServiceSettings], None],
) -> None:
    """Serve until SIGINT or SIGTERM. ``on_ready`` is called when the gateway responds."""
    home.create()
    lock = ServiceLock(home)
    state = ServiceState(
        pid=os.getpid(),
        launch=launch,
        instar_version=instar.__version__,
        is_background=_writes_to(home.log_file),
        started_at=time.time(),
        run_dir=str(config.run_dir.resolve()),
    )
    if not lock.acquire(state):
        running = lock.read_running()
        process = f" (process {running.pid}, {running.url or 'starting'})" if running is not None else ""
        raise InstarError(f"The service is already running{process}. Stop it first with `instar stop`.")
    try:
        if config.gateway.port == 0:
            port = choose_port(home, config.gateway.host)
            config = config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": port})})

        async def announce(run: LiveRun) -> None:
            settings = await ensure_keys(home, run.store, config.agent_id)
            lock.set_url(run.gateway_url)
            on_ready(run, settings)

        await serve_until_stopped(config, log, announce, [home.log_file], keep_sessions=True)
    finally:
        lock.release()


async def serve_until_stopped(
    config: RunConfig,
    log: Callable[[str], None],
    on_ready: Callable[[LiveRun], Awaitable[None]],
    logs: Sequence[Path] = (),
    *,
    version: PolicyRef | None = None,
    keep_sessions: bool = False,
) -> None:
    """Serve without training, and continue the run if its folder exists, until SIGINT or SIGTERM. The logs of
    the run, and other ``logs``, are kept below a maximum size. ``version`` and ``keep_sessions`` are those of
    `serve_run`."""
    run_exists = RunFolder(config.run_dir).config_file.is_file()
    async with serve_run(
        config, resume=run_exists, version=version, keep_sessions=keep_sessions, log=log
    ) as run:
        stop = asyncio.Event()
        run.interrupts.on_first_signal = stop.set  # before the URL is printed, after which a user may stop it
        await on_ready(run)
        await run_until_first(
            stop.wait(),
            asyncio.shield(run.cluster.failure),
            rotate_repeatedly(lambda: [*logs, *run.folder.logs.glob("*.log")]),
        )


def _writes_to(path: Path) -> bool:
    """Return True if the standard error of this process is the file."""
    try:
        return os.path.samestat(os.fstat(sys.stderr.fileno()), path.stat())
    except (OSError, ValueError):  # the file does not exist, or standard error is not a file
        return False
