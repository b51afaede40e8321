"""The role that serves the gateway."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from functools import partial

from instar.cluster.adapter import make_initial_policy
from instar.cluster.context import ADMIN_KEY_ENV, VERSION_ENV, RoleContext
from instar.cluster.endpoints import connect_to_engines
from instar.cluster.layout import engine_names
from instar.cluster.tasks import run_until_first
from instar.config import RunConfig
from instar.cpu import limit_fragmentation, release_freed_pages
from instar.engines.base import EngineInfo
from instar.errors import ConfigError
from instar.gateway.app import open_gateway
from instar.gateway.live_policies import LiveOptions
from instar.gateway.serve import serve
from instar.live.activity import ACTIVITY_FILE, ActivityRecorder
from instar.live.learning_window import yields_to_requests
from instar.rollout.admission import Admission
from instar.types import Artifact

MEMORY_RELEASE_INTERVAL_SECONDS = 30.0


async def run_gateway(context: RoleContext) -> None:
    limit_fragmentation()
    store = await context.open_store()
    await context.announce(store, "waiting for the engine" if engine_names(context.config) else "starting")
    config = context.config
    # A chosen version replies to all agents. Otherwise, the gateway itself loads the versions of live agents.
    is_live = config.trains_on_live and not os.environ.get(VERSION_ENV)
    fetch_policy = None if is_live else partial(context.fetch_policy, store)
    engine, watch_endpoints = await connect_to_engines(context, store, "engine", newest_policy=fetch_policy)
    live = make_live_options(config, engine.info) if engine is not None and is_live else None
    await context.announce(store, "loading the tokenizer")
    limits = config.gateway
    admission = Admission(config, store, context.run_id)
    admin_key = os.environ[ADMIN_KEY_ENV]
    async with open_gateway(config, store, engine, admin_key, admission, live) as app:
        activity = None
        if yields_to_requests(config):
            activity = ActivityRecorder(context.folder.path / ACTIVITY_FILE)
            app.announce_requests(activity)

        def describe_activity() -> str:
            state = "draining" if context.drain.is_set() else "serving"
            return f"{state}; {app.problem}" if app.problem else state

        tune_gc()
        context.is_started = True
        await run_until_first(
            serve(
                app,
                context.open_inherited_listener(),
                stop=context.stop,
                drain=context.drain,
                # Twice the gateway's limit, so that the gateway itself rejects slightly longer headers.
                max_head=2 * limits.max_header,
                head_timeout=limits.read_timeout,
                reject_early=app.reject_early,
            ),
            context.heartbeat(store, describe_activity),
            watch_endpoints(),
            _release_memory(),
            *([] if activity is None else [activity.run()]),
        )
    if engine is not None:
        await engine.close()
    await store.close()


def make_live_options(config: RunConfig, info: EngineInfo) -> LiveOptions:
    """Raises ConfigError if the engine serves only one version at a time."""
    if not info.serves_several_policies:
        setting = "engine.policy: must be adapter" if info.kind == "vllm" else "engine.type"
        raise ConfigError(
            f"{setting}: the {info.kind} engine serves only one version at a time, but with data "
            "'live' each agent has its own versions, and a canary serves beside the version that it may "
            "replace; use local, or vllm with engine.policy adapter"
        )
    initial = make_initial_policy(config)
    return LiveOptions(config.live.canary, Artifact("base") if initial is None else initial.artifact)


async def _release_memory() -> None:
    """Collect garbage and release freed memory, in at most 0.1% of the time because all calls wait."""
    seconds = 0.0
    while True:
        await asyncio.sleep(max(MEMORY_RELEASE_INTERVAL_SECONDS, 1000 * seconds))
        started = time.monotonic()
        gc.collect()
        await asyncio.to_thread(release_freed_pages)
        seconds = time.monotonic() - started


def tune_gc() -> None:
    """Leave full garbage collections to `_release_memory`. Sessions in memory consist of many small objects,
    and every request waits while the collector visits them. Requests and connections leave hardly any cycles
    of references, so new objects need not be collected often either."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 100, 1000)
