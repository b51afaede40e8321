"""Starts the engines and the gateway of a run, and stops them when the run ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from instar.backends.resolve import extract_secrets, resolve_run
from instar.cluster.context import ADMIN_KEY_ENV
from instar.cluster.control import RoleController, serve_control_socket
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.factory import create_cluster
from instar.cluster.layout import RunFolder, public_settings
from instar.cluster.live_run import LiveRun, start_engines_and_gateway, start_rewards, stop_watchers
from instar.config import RunConfig
from instar.errors import ConfigError
from instar.gateway.auth import resolve_admin_key
from instar.rewards.factory import create_background_scorers
from instar.store.base import Run, Store
from instar.store.factory import open_store


@asynccontextmanager
async def serve_run(
    config: RunConfig, *, resume: bool = False, live: bool = True, log: Callable[[str], None] = print
) -> AsyncGenerator[LiveRun]:
    """Start the engines and the gateway, yield the run when all of them answer, and finally stop everything.
    ``live`` is True if the run serves live sessions, which are then scored, too."""
    config, notes = resolve_run(config, os.environ)
    for note in notes:
        log(note)
    needs_rewards = create_background_scorers(config).are_needed(live=live)
    config, keys = extract_secrets(config, os.environ)
    folder = RunFolder(config.run_dir.resolve())
    config = config.model_copy(update={"dir": folder.path})
    _check_folder(folder, resume)
    async with AsyncExitStack() as resources:
        resources.callback(os.close, folder.lock("supervisor", wait=2.0))
        store = open_store(config)
        resources.push_async_callback(store.close)
        if not resume:
            await _check_name(config, store)
        folder.create(config)
        await _register_run(config, store)
        cluster = await create_cluster(config, folder, EndpointDirectory(store, config.name), log=log)
        resources.push_async_callback(cluster.close)
        control = RoleController(cluster, store, config.name)
        await resources.enter_async_context(serve_control_socket(control, folder.control_socket))
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
        resources.push_async_callback(stop_watchers, run)
        await start_engines_and_gateway(run)
        if needs_rewards:
            await start_rewards(run)
        yield run
    run.phase = "done"


def _check_folder(folder: RunFolder, resume: bool) -> None:
    exists = folder.config_file.is_file()
    if exists and not resume:
        raise ConfigError(
            f"the run folder {folder.path} exists. Continue it with --resume, or give the run another name"
        )
    if resume and not exists:
        raise ConfigError(f"nothing to resume: there is no run in {folder.path}")


async def _check_name(config: RunConfig, store: Store) -> None:
    """Raise ConfigError if the store, which several folders may share, already has a run of this name."""
    if await store.run(config.name) is not None:
        raise ConfigError(
            f"name: the store already has a run named {config.name!r}. Continue it with --resume from its "
            "folder, or give this run another name"
        )


async def _register_run(config: RunConfig, store: Store) -> None:
    existing = await store.run(config.name)
    await store.put_run(
        Run(
            config.name,
            config.name,
            public_settings(config),
            created_at=existing.created_at if existing else 0,
        )
    )
    # These endpoints are from an earlier process, whose finished rollout says nothing about the new one.
    for endpoint in await store.endpoints(config.name):
        await store.remove_endpoint(config.name, endpoint.role, endpoint.name)
