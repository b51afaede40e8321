"""The roles that serve an engine: the run's own engine, and the teacher."""

from __future__ import annotations

import asyncio
import logging
import os

from instar.backends.factory import create_backend
from instar.cluster.adapter import make_initial_policy
from instar.cluster.context import ENGINE_TOKEN_ENV, HEARTBEAT_INTERVAL_SECONDS, RoleContext
from instar.cluster.cores import share_cores
from instar.cluster.layout import engine_names, engine_process_config, teacher_config, teacher_names
from instar.cluster.tasks import run_until_first, wait_forever
from instar.cluster.versions import is_loadable
from instar.config import CloudEngineConfig
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.engines.server import DrainGate, LeaseFence, create_engine_app
from instar.errors import ConfigError, EngineUnavailable
from instar.gateway.serve import serve
from instar.store.base import Store
from instar.trainer.checkpoint import initial_path, load_initial_weights, policy_path
from instar.types import Artifact, Policy

logger = logging.getLogger(__name__)


async def run_engine(context: RoleContext) -> None:
    store = await context.open_store()
    await context.announce(store, "loading the model")
    names = engine_names(context.config)
    engine = create_engine(engine_process_config(context.config, names.index(context.name)))
    await engine.start(context.folder.log(context.name), logger.info)
    policy = await _choose_policy(context, store)
    if _must_load(policy):
        await engine.load(policy)
    await _serve_engine(context, store, engine, "trainer", process_count=len(names))


async def run_teacher(context: RoleContext) -> None:
    """Serve an engine that only computes logprobs. The trainer waits while the teacher computes, so the
    teacher shares the cores with the engines as the trainer would."""
    from instar.reference.factory import require_same_vocabulary

    config = teacher_config(context.config)
    store = await context.open_store()
    await context.announce(store, "loading the model")
    if not isinstance(config.engine, CloudEngineConfig):  # the tokenizer of a cloud model is not available
        require_same_vocabulary(context.config.model, config.model)
    names = teacher_names(context.config)
    engine = create_engine(engine_process_config(config, names.index(context.name)))
    await engine.start(context.folder.log(context.name), logger.info)
    if not engine.info.can_score:
        raise ConfigError(
            f"trainer.reference.engine.type: the {engine.info.kind} engine cannot compute prompt logprobs, "
            "which a teacher needs; use local or vllm"
        )
    await _serve_engine(context, store, engine, "engine", process_count=len(names))


async def _serve_engine(
    context: RoleContext, store: Store, engine: Engine, other_role: str, *, process_count: int
) -> None:
    """Serve the engine until the role is stopped or drained, and share the cores with ``other_role``. While
    one of several processes drains, the others take new requests. If there is only one, new requests wait in
    its socket until the next process accepts them."""
    listener = context.open_inherited_listener()
    gate, fence = DrainGate(), LeaseFence(await store.lease(context.run_id, "trainer"))
    status = await engine.status()
    unavailable_reason = ""

    def describe_activity() -> str:
        if unavailable_reason:
            return f"not ready: {unavailable_reason}"
        load = f"{status.running} running, {status.waiting} waiting" if status.running else "idle"
        return f"draining: {load}" if context.drain.is_set() else load

    async def drain() -> None:
        await context.drain.wait()
        await context.announce(store, describe_activity())
        # Clients that have not read the announcement yet may still connect, and must be served.
        await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)
        gate.close()
        await gate.drained.wait()
        context.stop.set()
        await wait_forever()

    async def refresh_status() -> None:
        nonlocal status, unavailable_reason
        while True:
            try:
                status, unavailable_reason = await engine.status(), ""
            except EngineUnavailable as error:  # the engine either recovers or raises a different error
                unavailable_reason = str(error)
            fence.raise_to(await store.lease(context.run_id, "trainer"))
            await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)

    app = create_engine_app(engine, os.environ[ENGINE_TOKEN_ENV], gate, fence)
    is_only_process = process_count == 1
    context.is_started = True
    await run_until_first(
        serve(app, listener, stop=context.stop, drain=context.drain if is_only_process else None),
        wait_forever() if is_only_process else drain(),
        refresh_status(),
        share_cores(context.config, store, other_role, engine.use_cores, process_count=process_count),
        context.heartbeat(store, describe_activity),
    )
    await engine.close()
    await store.close()


async def _choose_policy(context: RoleContext, store: Store) -> Policy:
    """Return the policy to serve or, if a new engine cannot load it, version 0. The engine serves it until
    the trainer sends another policy."""
    config = context.config
    head = await context.fetch_policy(store)
    if _must_load(head) and is_loadable(head):
        return head
    if config.model.adapter is None:
        return Policy(context.policy_id, 0, Artifact("base"))
    if (initial := make_initial_policy(config)) is not None:
        return initial
    if not initial_path(config.run_dir).is_dir():
        raise ConfigError(
            f"model.adapter: {initial_path(config.run_dir)} is not on this machine; set `dir` to a folder on "
            "a shared disk"
        )
    return await _export_initial_policy(context, store)


def _must_load(policy: Policy) -> bool:
    """Return True unless a new engine serves the policy. After a rollback to the base model, the policy has
    the weights of a new engine, but not its version."""
    return policy.artifact.kind != "base" or policy.version > 0


async def _export_initial_policy(context: RoleContext, store: Store) -> Policy:
    """Export a sampler from the state on the training service that the run starts from."""
    await context.announce(store, f"exporting {context.config.model.adapter}")
    backend = create_backend(context.config)
    try:
        await load_initial_weights(context.config, backend)
        artifact = await backend.publish(policy_path(context.config.run_dir, 0))
    finally:
        await backend.close()
    for policy_id in dict.fromkeys([context.policy_id, *context.config.policy_ids]):
        await store.put_initial_policy(Policy(policy_id, 0, artifact), context.run_id)
    return Policy(context.policy_id, 0, artifact)
