"""The role that serves the gateway."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from functools import partial

from instar.cluster.context import ADMIN_KEY_ENV, RoleContext
from instar.cluster.endpoints import connect_to_engines
from instar.cluster.layout import engine_names
from instar.cluster.tasks import run_until_first
from instar.cpu import limit_fragmentation, release_freed_pages
from instar.gateway.app import open_gateway
from instar.gateway.serve import serve
from instar.live.activity import ACTIVITY_FILE, ActivityRecorder
from instar.live.learning_window import yields_to_requests
from instar.rollout.admission import Admission

MEMORY_RELEASE_INTERVAL_SECONDS = 30.0


async def run_gateway(context: RoleContext) -> None:
    limit_fragmentation()
    store = await context.open_store()
    await context.announce(store, "waiting for the engine" if engine_names(context.config) else "starting")
    fetch_policy = partial(context.fetch_policy, store)
    engine, watch_endpoints = await connect_to_engines(context, store, "engine", newest_policy=fetch_policy)
    await context.announce(store, "loading the tokenizer")
    limits = context.config.gateway
    admission = Admission(context.config, store, context.run_id)
    async with open_gateway(context.config, store, engine, os.environ[ADMIN_KEY_ENV], admission) as app:
        activity = None
        if yields_to_requests(context.config):
            activity = ActivityRecorder(context.folder.path / ACTIVITY_FILE)
            app.announce_requests(activity)
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
            context.heartbeat(store, lambda: "draining" if context.drain.is_set() else "serving"),
            watch_endpoints(),
            _release_memory(),
            *([] if activity is None else [activity.run()]),
        )
    if engine is not None:
        await engine.close()
    await store.close()


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
