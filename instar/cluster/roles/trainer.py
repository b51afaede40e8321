"""The role that trains the policy."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack

from instar.backends.factory import apply_capabilities, create_backend
from instar.cluster.context import ENGINE_TOKEN_ENV, HEARTBEAT_INTERVAL_SECONDS, ROLLOUT_FINISHED, RoleContext
from instar.cluster.cores import share_cores
from instar.cluster.endpoints import EndpointDirectory, EngineConnections, connect_to_engines
from instar.cluster.tasks import background_tasks, call_when_set
from instar.config import LocalClusterConfig, RunConfig
from instar.config.live_data import BASE_REFERENCE
from instar.live.base import may_always_run
from instar.live.reference_set import sample_reference_set
from instar.live.resample import Resampler
from instar.models import resolve_tokenizer
from instar.record.base import Renderer
from instar.reference.factory import create_penalty
from instar.store.base import Store
from instar.sync.factory import create_sync_route
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor
from instar.trainer.publishing import PolicyPublisher
from instar.types import Channel, GroupStatus
from instar.umask import PRIVATE_UMASK

logger = logging.getLogger(__name__)


async def run_trainer(context: RoleContext) -> None:
    store = await context.open_store()
    await context.announce(store, "loading the model")
    async with AsyncExitStack() as resources:
        backend = create_backend(context.config)
        config, warnings = apply_capabilities(context.config, backend.capabilities)
        os.umask(PRIVATE_UMASK)  # only now, because the downloaded model may be shared with other users
        engines = EngineConnections(
            EndpointDirectory(store, context.run_id),
            os.environ[ENGINE_TOKEN_ENV],
            context.lease,
            skip_unresponsive=not isinstance(config.cluster, LocalClusterConfig),
        )
        resources.push_async_callback(engines.close)
        resources.push_async_callback(backend.close)
        connected = await engines.wait_for_first()
        teacher, watch_teacher = await connect_to_engines(context, store, "teacher")
        async with background_tasks(watch_teacher()):
            penalty = create_penalty(config, backend, teacher)
            if penalty is not None:
                resources.push_async_callback(penalty.close)
                await penalty.start()
            monitor = Monitor(config.run_dir, tensorboard=config.trainer.tensorboard)
            resources.callback(monitor.close)
            for warning in warnings:
                logger.warning(warning)
                monitor.record("warning", 0, {"text": warning})
            sync = await create_sync_route(config, backend, connected)
            resources.push_async_callback(sync.close)
            logger.info("sync route: %s", sync.description)
            trainer = Trainer(
                config,
                store=store,
                backend=backend,
                publisher=PolicyPublisher(sync, engines.refresh, every=config.sync.every),
                monitor=monitor,
                penalty=penalty,
            )
            trainer.is_rollout_finished = not (config.trains_on_groups or config.trains_on_live)
            context.is_started = True
            async with background_tasks(
                call_when_set(trainer.stop, context.stop, context.drain),
                _watch_rollout(store, context.run_id, trainer),
                share_cores(config, store, "engine", backend.use_cores),
                context.heartbeat(store, lambda: trainer.activity),
                _sample_for_live(context, store, config),
            ):
                await trainer.run()
    await context.announce(store, trainer.activity)
    await store.close()


async def _sample_for_live(context: RoleContext, store: Store, config: RunConfig) -> None:
    """Sample the reference set, and resample live sessions, if the run is configured so."""
    samples_reference = config.reference_label == BASE_REFERENCE
    resamples = config.trains_on_live and config.live.resample > 1
    if not (samples_reference or resamples):
        return
    folder = resolve_tokenizer(config.model.name)
    renderer = await asyncio.to_thread(Renderer.load, folder, config.model)
    engine, watch_engines = await connect_to_engines(context, store, "engine")
    assert engine is not None, "a run that trains on live traffic has an engine"
    async with background_tasks(watch_engines()):
        if samples_reference:
            await sample_reference_set(store, config, engine, renderer, may_always_run)
        if resamples:
            await Resampler(store, config, renderer, engine, may_always_run).run()


async def _watch_rollout(store: Store, run_id: str, trainer: Trainer) -> None:
    """Make the trainer stop after the remaining groups once the rollout has finished and all are scored."""
    while trainer.config.trains_on_groups and not trainer.is_rollout_finished:
        endpoints = await store.endpoints(run_id)
        if any(e.role == "rollout" and e.doing == ROLLOUT_FINISHED for e in endpoints):
            trainer.is_rollout_finished = not await store.groups(run_id, Channel.TRAIN, GroupStatus.SCORING)
        await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)
