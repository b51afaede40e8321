"""The role that trains the policy."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

from instar.backends.factory import apply_capabilities, create_backend
from instar.cluster.context import ENGINE_TOKEN_ENV, HEARTBEAT_INTERVAL_SECONDS, ROLLOUT_FINISHED, RoleContext
from instar.cluster.cores import share_cores
from instar.cluster.endpoints import EndpointDirectory, EngineConnections, connect_to_engines
from instar.cluster.tasks import background_tasks, call_when_set
from instar.config import LocalClusterConfig, RunConfig
from instar.config.live_data import BASE_REFERENCE
from instar.live.learning_window import LearningWindow, yields_to_requests
from instar.live.reference_set import sample_reference_set
from instar.live.resample import Resampler
from instar.models import resolve_tokenizer
from instar.record.base import Renderer
from instar.reference.factory import create_penalty
from instar.store.base import Store
from instar.sync.factory import create_sync_route
from instar.trainer.live import LineageTrainer, LiveTrainer
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor
from instar.trainer.publishing import PolicyPublisher
from instar.types import Channel, GroupStatus
from instar.umask import PRIVATE_UMASK

logger = logging.getLogger(__name__)

REDUCED_PRIORITY = 10
"""The niceness of a trainer that pauses for live requests, because it pauses only at the next layer."""
T = TypeVar("T", bound=Trainer)


async def run_trainer(context: RoleContext) -> None:
    store = await context.open_store()
    await context.announce(store, "loading the model")
    if yields_to_requests(context.config):
        os.nice(REDUCED_PRIORITY)
    async with AsyncExitStack() as resources:
        backend = create_backend(context.config)
        config, warnings = apply_capabilities(context.config, backend.capabilities)
        os.umask(PRIVATE_UMASK)  # only now, because the downloaded model may be shared with other users
        engines = _open_engines(context, store, config)
        resources.push_async_callback(engines.close)
        resources.push_async_callback(backend.close)
        connected = await engines.wait_for_first()
        teacher, watch_teacher = await connect_to_engines(context, store, "teacher")
        async with background_tasks(watch_teacher()):
            penalty = create_penalty(config, backend, teacher)
            if penalty is not None:
                resources.push_async_callback(penalty.close)
                await penalty.start()
            monitors = _open_monitors(config, resources)
            for warning in warnings:
                logger.warning(warning)
                next(iter(monitors.values())).record("warning", 0, {"text": warning})
            sync = await create_sync_route(config, backend, connected)
            resources.push_async_callback(sync.close)
            logger.info("sync route: %s", sync.description)
            publisher = PolicyPublisher(sync, engines.refresh, every=config.sync.every)

            def create(trainer_class: type[T], config: RunConfig, agent: str | None) -> T:
                return trainer_class(
                    config,
                    store=store,
                    backend=backend,
                    publisher=publisher,
                    monitor=monitors[agent],
                    penalty=penalty,
                )

            window = None
            if config.trains_on_live:
                window = LearningWindow(config, store)
                resources.callback(window.close)
                backend.set_pause(window.pause)
                lineages = [create(LineageTrainer, config.select_agent(a), a) for a in config.trained_agents]
                trainer = LiveTrainer(config, backend, lineages, may_run=window.may_start_step)
            else:
                trainer = create(Trainer, config, None)
                trainer.is_rollout_finished = not config.trains_on_groups
            context.is_started = True
            async with background_tasks(
                call_when_set(partial(_stop, trainer, window), context.stop, context.drain),
                *([] if window is None else [window.run()]),
                _watch_rollout(store, context.run_id, trainer),
                share_cores(config, store, "engine", backend.use_cores),
                context.heartbeat(store, partial(_describe_activity, trainer, window)),
                _sample_for_live(context, store, config, window),
            ):
                await trainer.run()
    await context.announce(store, trainer.activity)
    await store.close()


def _open_engines(context: RoleContext, store: Store, config: RunConfig) -> EngineConnections:
    return EngineConnections(
        EndpointDirectory(store, context.run_id),
        os.environ[ENGINE_TOKEN_ENV],
        context.lease,
        skip_unresponsive=not isinstance(config.cluster, LocalClusterConfig),
    )


def _stop(trainer: Trainer | LiveTrainer, window: LearningWindow | None) -> None:
    trainer.stop()
    if window is not None:
        window.release()  # the trainer finishes the current step, even if it was paused


def _describe_activity(trainer: Trainer | LiveTrainer, window: LearningWindow | None) -> str:
    return trainer.activity if window is None else window.describe(trainer.activity)


def _open_monitors(config: RunConfig, resources: AsyncExitStack) -> dict[str | None, Monitor]:
    """Return a monitor for each policy, by agent. The agent is None if there is one policy for all agents."""
    setting = config.trainer.tensorboard
    monitors = {
        agent: Monitor(config.run_dir, tensorboard=setting, agent=agent)
        for agent in config.trained_agents or [None]
    }
    for monitor in monitors.values():
        resources.callback(monitor.close)
    return monitors


async def _sample_for_live(
    context: RoleContext, store: Store, config: RunConfig, window: LearningWindow | None
) -> None:
    """Sample the reference set, and resample live sessions, if the run is configured so."""
    samples_reference = config.reference_label == BASE_REFERENCE
    resamples = config.trains_on_live and config.live.resample > 1
    if window is None or not (samples_reference or resamples):
        return
    folder = resolve_tokenizer(config.model.name)
    renderer = await asyncio.to_thread(Renderer.load, folder, config.model)
    engine, watch_engines = await connect_to_engines(context, store, "engine")
    assert engine is not None, "a run that trains on live traffic has an engine"
    async with background_tasks(watch_engines()):
        if samples_reference:
            await sample_reference_set(store, config, engine, renderer, window.may_run_now)
        if resamples:
            await Resampler(store, config, renderer, engine, window.may_run_now).run()


async def _watch_rollout(store: Store, run_id: str, trainer: Trainer | LiveTrainer) -> None:
    """Make the trainer stop after the remaining groups once the rollout has finished and all are scored."""
    while isinstance(trainer, Trainer) and not trainer.is_rollout_finished:
        endpoints = await store.endpoints(run_id)
        if any(e.role == "rollout" and e.doing == ROLLOUT_FINISHED for e in endpoints):
            trainer.is_rollout_finished = not await store.groups(run_id, Channel.TRAIN, GroupStatus.SCORING)
        await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)
