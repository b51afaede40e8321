"""The entry point of a role process: ``python -m instar.cluster.role ROLE RUN_DIR``.

The supervisor starts it. A role reads its part of the config from the run's folder, announces itself in the
store, ends gracefully on SIGTERM, drains on SIGUSR1, and exits at once when its supervisor is gone. Keys come
through the environment, never through the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from instar.cluster.base import DRAIN_SIGNAL, EXIT_FATAL, EXIT_STOPPED
from instar.cluster.context import RoleContext
from instar.cluster.layout import RunFolder
from instar.errors import EngineUnavailable, InstarError, StoreFull
from instar.logs import configure_logging
from instar.registry import load_object

ROLES = {
    "engine": "instar.cluster.roles.engine:run_engine",
    "teacher": "instar.cluster.roles.engine:run_teacher",
    "gateway": "instar.cluster.roles.gateway:run_gateway",
    "trainer": "instar.cluster.roles.trainer:run_trainer",
    "rollout": "instar.cluster.roles.rollout:run_rollout",
    "rewards": "instar.cluster.roles.rewards:run_rewards",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instar.cluster.role")
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", help="the name of this process among those of the role")
    parser.add_argument("--lifeline", type=int, required=True, help="a pipe that ends with the supervisor")
    parser.add_argument("--fd", type=int, help="the socket to listen on")
    parser.add_argument("--evaluate", metavar="LABEL")
    arguments = parser.parse_args()
    configure_logging()
    _exit_with_supervisor(arguments.lifeline)
    folder = RunFolder(arguments.run_dir)
    try:
        lock = folder.lock(arguments.name or arguments.role)
        code = _run(arguments.role, folder, arguments)
        os.close(lock)
    except (EngineUnavailable, StoreFull):
        # These may pass; exit code 1 makes the supervisor start the role again.
        traceback.print_exc()
        code = 1
    except InstarError as error:
        traceback.print_exc()
        # Not through the logger: the supervisor reports the last line of the log as the cause of the failure.
        sys.stderr.write(str(error).replace("\n", " ") + "\n")
        sys.stderr.flush()
        code = EXIT_FATAL
    sys.exit(code)


def _run(role: str, folder: RunFolder, arguments: argparse.Namespace) -> int:
    import uvloop

    run_role: Callable[[RoleContext], Awaitable[None]] = load_object(ROLES[role])

    async def run() -> int:
        context = RoleContext(role, folder, arguments)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, context.stop.set)
        loop.add_signal_handler(DRAIN_SIGNAL, context.drain.set)
        await run_role(context)
        # The supervisor knows whether the run itself sent the signal.
        return EXIT_STOPPED if context.stop.is_set() or context.drain.is_set() else 0

    return uvloop.run(run())


def _exit_with_supervisor(lifeline: int) -> None:
    """Exit when the pipe from the supervisor closes; nothing would watch or stop the role without it."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


# --- the roles ----------------------------------------------------------------------------------


async def engine(context: RoleContext) -> None:
    from instar.engines.factory import create_engine

    store = await context.open_store()
    await context.announce(store, "loading the model")
    place = engine_names(context.config).index(context.name)
    served = create_engine(engine_process_config(context.config, place))
    await served.bring_up(context.folder.log(context.name), context.log)
    head = await store.head(context.policy_id)
    if head.version > 0 and _is_at_hand(head):
        await served.load(head)
    await _serve_engine(context, store, served, "trainer", among=len(engine_names(context.config)))


async def teacher(context: RoleContext) -> None:
    """An engine that is asked only about given tokens. It computes while the trainer waits, and takes the
    trainer's place beside the engines."""
    from instar.engines.factory import create_engine
    from instar.reference.vocabulary import require_same_vocabulary

    config = teacher_config(context.config)
    store = await context.open_store()
    await context.announce(store, "loading the model")
    if not isinstance(config.engine, CloudEngineConfig):  # a service's tokenizer is not at hand
        require_same_vocabulary(context.config.model, config.model)
    place = teacher_names(context.config).index(context.name)
    served = create_engine(engine_process_config(config, place))
    await served.bring_up(context.folder.log(context.name), context.log)
    if not served.info.scores:
        raise ConfigError(
            f"trainer.reference.engine.type: the {served.info.kind} engine does not tell the logprobs of "
            "given tokens, so it cannot be a teacher"
        )
    await _serve_engine(context, store, served, "engine", among=len(teacher_names(context.config)))


async def _serve_engine(
    context: RoleContext, store: Store, served: Engine, other: str, *, among: int
) -> None:
    """Until the role is stopped. ``other``: the role that it shares the cores with. ``among``: its processes.
    While one of several is drained, the others take what comes; what comes to the only one waits at the
    socket."""
    from instar.engines.server import Gate, create_engine_app
    from instar.gateway.serve import serve

    listener = context.socket()
    gate = Gate()
    status = await served.status()
    away = ""

    def doing() -> str:
        if away:
            return f"not ready: {away}"
        busy = f"{status.running} running, {status.waiting} waiting" if status.running else "idle"
        return f"draining: {busy}" if context.drain.is_set() else busy

    async def drain() -> None:
        await context.drain.wait()
        await context.announce(store, doing())
        await asyncio.sleep(HEARTBEAT_SECONDS)  # who had not read that yet has connected, and is answered
        gate.close()
        await gate.empty.wait()
        context.stop.set()
        await wait_forever()

    async def refresh() -> None:
        nonlocal status, away
        while True:
            try:
                status, away = await served.status(), ""
            except EngineUnavailable as error:  # it brings itself back, or raises another error in the end
                away = str(error)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    app = create_engine_app(served, os.environ[ENGINE_TOKEN_ENV], gate)
    alone = among == 1
    await run_until_first(
        serve(app, listener, stop=context.stop, drain=context.drain if alone else None),
        wait_forever() if alone else drain(),
        refresh(),
        share_cores(context.config, store, other, served.use_cores, among=among),
        context.heartbeat(store, doing),
    )
    await served.close()
    await store.close()


def _is_at_hand(policy: Policy) -> bool:
    """Whether an engine that begins can load it. What is not, the trainer brings: weights that it alone has,
    a folder that this machine does not see, a sampler at a service that has expired."""
    artifact = policy.artifact
    if artifact.kind in ("adapter", "weights"):
        return Path(artifact.path).is_dir()
    return artifact.kind != "live" and (artifact.expires_at is None or artifact.expires_at > time.time())


async def gateway(context: RoleContext) -> None:
    from instar.gateway.factory import open_gateway
    from instar.gateway.serve import serve

    store = await context.open_store()
    await context.announce(store, "waiting for the engine")

    async def head() -> Policy:
        return await store.head(context.policy_id)

    connected, follow = None, wait_forever
    if engine_names(context.config):
        connected, follow = await _connect(context, store, "engine", newest=head)
    await context.announce(store, "loading the tokenizer")
    limits = context.config.gateway
    async with open_gateway(context.config, store, connected, os.environ[ADMIN_KEY_ENV]) as app:
        tune_gc()
        await run_until_first(
            serve(
                app,
                context.socket(),
                stop=context.stop,
                drain=context.drain,
                # What is larger than the gateway's own limit, and yet not without end, it refuses itself.
                max_head=2 * limits.max_header,
                head_timeout=limits.read_timeout,
            ),
            context.heartbeat(store, lambda: "draining" if context.drain.is_set() else "serving"),
            follow(),
        )
    if connected is not None:
        await connected.close()
    await store.close()


async def _connect(
    context: RoleContext, store: Store, role: str, *, newest: Newest | None = None
) -> tuple[Engine, Callable[[], Coroutine[Any, Any, None]]]:
    """The run's engines as one, and what is to run meanwhile so that they are found where they go, and when
    they return."""
    from instar.cluster.endpoints import DiscoveredEnginePool, EndpointDirectory
    from instar.engines.remote import RemoteEngine

    directory, token = EndpointDirectory(store, context.run_id), os.environ[ENGINE_TOKEN_ENV]
    names = engine_names(context.config) if role == "engine" else teacher_names(context.config)
    if isinstance(context.config.cluster, LocalClusterConfig) and len(names) == 1:
        # It does not move, and while it is away what comes to it waits at its socket.
        (url,) = (await directory.wait_for_urls(role, timeout=300)).values()
        return await RemoteEngine.connect(url, token, 300), wait_forever
    pool = DiscoveredEnginePool(directory, token, role=role, newest=newest)
    await pool.start()
    return pool, pool.watch_endpoints


def tune_gc() -> None:
    """What is loaded stays, and sessions at hand are many small objects: looking through all of them now and
    then would hold up every request meanwhile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)


async def trainer(context: RoleContext) -> None:
    from instar.backends.factory import apply_capabilities, create_backend
    from instar.cluster.endpoints import EndpointDirectory, EngineConnections
    from instar.data.batcher import Batcher
    from instar.reference.factory import create_penalty
    from instar.sync.factory import create_sync
    from instar.trainer.loop import Trainer
    from instar.trainer.monitor import Monitor

    config = context.config
    store = await context.open_store()
    await context.announce(store, "loading the model")
    backend = create_backend(config)
    config, warnings = apply_capabilities(config, backend.capabilities)
    engines = EngineConnections(
        EndpointDirectory(store, context.run_id),
        os.environ[ENGINE_TOKEN_ENV],
        skip_silent=not isinstance(config.cluster, LocalClusterConfig),
    )
    known = await engines.wait_for_first()
    teaching, follow = None, wait_forever
    if teacher_names(config):
        teaching, follow = await _connect(context, store, "teacher")
    finding = asyncio.create_task(follow())
    penalty = create_penalty(config, backend, teaching)
    if penalty is not None:
        await penalty.start()

    monitor = Monitor(config.run_dir, tensorboard=config.trainer.tensorboard)
    for warning in warnings:
        context.log(f"warning: {warning}")
        monitor.record("warning", 0, {"text": warning})
    sync = await create_sync(config, backend, known)
    context.log(f"weights reach the engines by {sync.route}")
    loop = Trainer(
        config,
        context.run_id,
        context.policy_id,
        store=store,
        backend=backend,
        batcher=Batcher(store, context.run_id, config),
        sync=sync,
        engines=engines.list_current,
        monitor=monitor,
        penalty=penalty,
        log=context.log,
    )
    loop.is_rollout_finished = not config.trains_live
    stopper = asyncio.create_task(call_when_set(loop.stop, context.stop, context.drain))
    watching = asyncio.create_task(_watch_rollout(store, context.run_id, loop))
    sharing = asyncio.create_task(share_cores(config, store, "engine", backend.use_cores))
    beating = asyncio.create_task(context.heartbeat(store, lambda: loop.doing))
    try:
        await loop.run()
    finally:
        stopper.cancel()
        watching.cancel()
        sharing.cancel()
        beating.cancel()
        finding.cancel()
        monitor.close()
        if penalty is not None:
            await penalty.close()
        await sync.close()
        await backend.close()
        await engines.close()
    await context.announce(store, loop.doing)
    await store.close()


async def _watch_rollout(store: Store, run_id: str, loop: Trainer) -> None:
    """Rollout that ended by itself brings no more data: the trainer drains what there is."""
    while not loop.is_rollout_finished:
        endpoints = await store.endpoints(run_id)
        if any(e.role == "rollout" and e.doing == FINISHED for e in endpoints):
            loop.is_rollout_finished = not await store.groups(run_id, Channel.TRAIN, GroupStatus.SCORING)
        await asyncio.sleep(HEARTBEAT_SECONDS)


async def rollout(context: RoleContext) -> None:
    from instar.cluster.endpoints import EndpointDirectory
    from instar.data.combine import RewardCombiner
    from instar.rollout.agents import create_agent
    from instar.rollout.evaluate import Evaluator
    from instar.rollout.gateway_client import GatewayClient
    from instar.rollout.runner import RolloutRunner
    from instar.rollout.slots import RolloutServices
    from instar.rollout.tasks import load_tasks
    from instar.trainer.monitor import Monitor

    config = context.config
    assert config.rollout is not None
    store = await context.open_store()
    await context.announce(store, "loading tasks")
    # Out of the environment before any agent's code runs: what that starts inherits the rest.
    os.environ.pop(ENGINE_TOKEN_ENV)
    directory = EndpointDirectory(store, context.run_id)
    (url,) = (await directory.wait_for_urls("gateway")).values()
    client = GatewayClient(url, os.environ.pop(ADMIN_KEY_ENV))
    following = asyncio.create_task(directory.watch_url("gateway", client.set_url))
    agent = create_agent(config.rollout.agent)
    monitor = Monitor(config.run_dir)
    evaluator = None
    scorings = RolloutScorers(context, store)
    try:
        if config.eval is not None:
            held_out = load_tasks(config.eval.tasks)
            services = RolloutServices(store, client, agent, await scorings.start(held_out))
            evaluator = Evaluator(config, held_out, services, monitor.record, combine=RewardCombiner(config))
        if context.arguments.evaluate:
            assert evaluator is not None
            beating = asyncio.create_task(context.heartbeat(store, lambda: evaluator.doing))
            await run_until_first(
                evaluator.try_evaluate_all(context.arguments.evaluate), wait_any(context.stop, context.drain)
            )
        else:
            tasks = load_tasks(config.rollout.tasks)
            services = RolloutServices(store, client, agent, await scorings.start(tasks))
            runner = RolloutRunner(config, tasks, services)
            runner.evaluator = evaluator
            beating = asyncio.create_task(context.heartbeat(store, lambda: runner.doing))
            draining = asyncio.create_task(call_when_set(runner.drain, context.drain))
            await run_until_first(runner.run(), context.stop.wait())
            draining.cancel()
        beating.cancel()
    finally:
        following.cancel()
        await scorings.close()
        await agent.close()
        await client.close()
        monitor.close()
    if not (context.stop.is_set() or context.drain.is_set() or context.arguments.evaluate):
        await context.announce(store, FINISHED)
    await store.close()


ROLES: dict[str, Callable[[RoleContext], Awaitable[None]]] = {
    "engine": engine,
    "teacher": teacher,
    "gateway": gateway,
    "trainer": trainer,
    "rollout": rollout,
    "rewards": rewards,
}


if __name__ == "__main__":
    main()
