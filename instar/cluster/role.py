"""One role of a run in a process of its own: ``python -m instar.cluster.role ROLE RUN_DIR``.

Started by the supervisor. Reads its part of the config from the run's folder, announces itself in the
store, ends gracefully on SIGTERM, and ends at once when its supervisor is gone. Keys come by the
environment, never by the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from instar.cluster.base import FATAL
from instar.cluster.cores import share_cores
from instar.cluster.layout import RunFolder, engine_names, teacher_config, teacher_names
from instar.cluster.supervisor import ROLE_URL
from instar.config import CloudEngineConfig, RunConfig
from instar.errors import ConfigError, EngineUnavailable, InstarError, StoreFull
from instar.store.base import Store
from instar.types import Endpoint, Policy

if TYPE_CHECKING:
    from instar.engines.base import Engine
    from instar.trainer.loop import Trainer

ADMIN_KEY = "INSTAR_ADMIN_KEY"
ENGINE_TOKEN = "INSTAR_ENGINE_TOKEN"
ENGINE_URLS = "INSTAR_ENGINE_URLS"
"""Where all of them do, with spaces between."""
TEACHER_URLS = "INSTAR_TEACHER_URLS"
"""Where the engines of the teacher do, if there is one."""
GATEWAY_URL = "INSTAR_GATEWAY_URL"
HEARTBEAT = 0.5
FINISHED = "finished"


class Context:
    """What every role has at hand."""

    def __init__(self, role: str, folder: RunFolder, arguments: argparse.Namespace) -> None:
        self.role = role
        self.name: str = arguments.name or role
        self.folder = folder
        self.config: RunConfig = folder.read_config()
        self.arguments = arguments
        self.stop = asyncio.Event()

    @property
    def run_id(self) -> str:
        return self.config.name

    @property
    def policy_id(self) -> str:
        return self.config.name

    def socket(self) -> socket.socket:
        return socket.socket(fileno=self.arguments.fd)

    def log(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def open_store(self) -> Store:
        from instar.store.factory import open_store

        return open_store(self.config)

    async def heartbeat(self, store: Store, doing: Callable[[], str], url: str = "") -> None:
        """Say what this role does, twice a second, until cancelled."""
        while True:
            await self.announce(store, doing(), url)
            await asyncio.sleep(HEARTBEAT)

    async def announce(self, store: Store, doing: str, url: str = "") -> None:
        await store.put_endpoint(
            Endpoint(
                self.run_id,
                self.role,
                self.name,
                url,
                os.getpid(),
                doing,
                str(self.folder.log(self.name)),
                time.time(),
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instar.cluster.role")
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", help="tells processes of one role apart")
    parser.add_argument("--lifeline", type=int, required=True, help="a pipe that ends with the supervisor")
    parser.add_argument("--fd", type=int, help="the socket to listen on")
    parser.add_argument("--evaluate", metavar="LABEL")
    arguments = parser.parse_args()
    _end_with_supervisor(arguments.lifeline)
    folder = RunFolder(arguments.run_dir)
    try:
        lock = folder.lock(arguments.name or arguments.role)
        code = _run(arguments.role, folder, arguments)
        os.close(lock)
    except (EngineUnavailable, StoreFull):
        # May pass by itself: let the supervisor start the role again.
        traceback.print_exc()
        code = 1
    except InstarError as error:
        traceback.print_exc()
        print(str(error).replace("\n", " "), file=sys.stderr, flush=True)
        code = FATAL
    sys.exit(code)


def _run(role: str, folder: RunFolder, arguments: argparse.Namespace) -> int:
    import uvloop

    async def amain() -> None:
        context = Context(role, folder, arguments)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, context.stop.set)
        await ROLES[role](context)

    uvloop.run(amain())
    return 0


def _end_with_supervisor(lifeline: int) -> None:
    """A role without its supervisor would go on unseen: end when the pipe from it does."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


# --- the roles ----------------------------------------------------------------------------------


async def engine(context: Context) -> None:
    from instar.engines.factory import create_engine

    store = context.open_store()
    await context.announce(store, "loading the model")
    served = create_engine(context.config)
    head = await store.head(context.policy_id)
    if head.version > 0 and not _has_expired(head):
        await served.load(head)
    await _serve_engine(context, store, served, "trainer", among=len(engine_names(context.config)))


async def teacher(context: Context) -> None:
    """An engine that is asked only about given tokens. It computes while the trainer waits, and takes the
    trainer's place beside the engines."""
    from instar.engines.factory import create_engine
    from instar.reference.vocabulary import require_same_vocabulary

    config = teacher_config(context.config)
    store = context.open_store()
    await context.announce(store, "loading the model")
    if not isinstance(config.engine, CloudEngineConfig):  # a service's tokenizer is not at hand
        require_same_vocabulary(context.config.model, config.model)
    served = create_engine(config)
    if not served.info.scores:
        raise ConfigError(
            f"trainer.reference.engine.type: the {served.info.kind} engine does not tell the logprobs of "
            "given tokens, so it cannot be a teacher"
        )
    await _serve_engine(context, store, served, "engine", among=len(teacher_names(context.config)))


async def _serve_engine(context: Context, store: Store, served: Engine, other: str, *, among: int) -> None:
    """Until the role is stopped. ``other``: the role that it shares the cores with."""
    from instar.engines.server import create_engine_app
    from instar.gateway.serve import serve

    listener = context.socket()
    status = await served.status()

    def doing() -> str:
        return f"{status.running} running, {status.waiting} waiting" if status.running else "idle"

    async def refresh() -> None:
        nonlocal status
        while True:
            status = await served.status()
            await asyncio.sleep(HEARTBEAT)

    app = create_engine_app(served, os.environ[ENGINE_TOKEN])
    await _first(
        serve(app, listener, stop=context.stop),
        refresh(),
        share_cores(context.config, store, other, served.use_cores, among=among),
        context.heartbeat(store, doing, os.environ[ROLE_URL]),
    )
    await served.close()
    await store.close()


def _has_expired(policy: Policy) -> bool:
    """Of a sampler at a service: the trainer exports it again and brings it here."""
    expires = policy.artifact.expires_at
    return expires is not None and expires <= time.time()


async def gateway(context: Context) -> None:
    from instar.engines.factory import connect_engines
    from instar.gateway.build import gateway_app
    from instar.gateway.serve import serve

    store = context.open_store()
    await context.announce(store, "waiting for the engine")

    async def head() -> Policy:
        return await store.head(context.policy_id)

    urls = os.environ[ENGINE_URLS].split()
    connected = (
        await connect_engines(urls, os.environ[ENGINE_TOKEN], timeout=300, newest=head) if urls else None
    )
    await context.announce(store, "loading the tokenizer")
    limits = context.config.gateway
    async with gateway_app(context.config, store, connected, os.environ[ADMIN_KEY]) as app:
        _spare_the_collector()
        await _first(
            serve(
                app,
                context.socket(),
                stop=context.stop,
                # What is larger than the gateway's own limit, and yet not without end, it refuses itself.
                max_head=2 * limits.max_header,
                head_timeout=limits.read_timeout,
            ),
            context.heartbeat(store, lambda: "serving", os.environ[ROLE_URL]),
        )
    if connected is not None:
        await connected.close()
    await store.close()


def _spare_the_collector() -> None:
    """What is loaded stays, and sessions at hand are many small objects: looking through all of them now and
    then would hold up every request meanwhile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)


async def trainer(context: Context) -> None:
    from instar.backends.factory import create_backend, settle
    from instar.data.batcher import Batcher
    from instar.engines.factory import connect_engines
    from instar.engines.remote import RemoteEngine
    from instar.reference.factory import create_penalty
    from instar.sync.factory import create_sync
    from instar.trainer.loop import Trainer
    from instar.trainer.monitor import Monitor

    config = context.config
    store = context.open_store()
    await context.announce(store, "loading the model")
    backend = create_backend(config)
    config, warnings = settle(config, backend.capabilities)
    token = os.environ[ENGINE_TOKEN]
    engines: list[Engine] = await asyncio.gather(
        *(RemoteEngine.connect(url, token, timeout=300) for url in os.environ[ENGINE_URLS].split())
    )

    teachers = os.environ[TEACHER_URLS].split()
    teaching = await connect_engines(teachers, token, timeout=300) if teachers else None
    penalty = create_penalty(config, backend, teaching)
    if penalty is not None:
        await penalty.start()

    async def current_engines() -> list[Engine]:
        return engines

    monitor = Monitor(config.run_dir, tensorboard=config.trainer.tensorboard)
    for warning in warnings:
        context.log(f"warning: {warning}")
        monitor.record("warning", 0, {"text": warning})
    loop = Trainer(
        config,
        context.run_id,
        context.policy_id,
        store=store,
        backend=backend,
        batcher=Batcher(store, context.run_id, config),
        sync=create_sync(backend.capabilities.artifacts, engines[0].info.artifacts),
        engines=current_engines,
        monitor=monitor,
        penalty=penalty,
        log=context.log,
    )
    stopper = asyncio.create_task(_when(context.stop, loop.stop))
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
        monitor.close()
        if penalty is not None:
            await penalty.close()
        await backend.close()
        for connected in engines:
            await connected.close()
    await context.announce(store, loop.doing)
    await store.close()


async def _watch_rollout(store: Store, run_id: str, loop: Trainer) -> None:
    """Rollout that ended by itself brings no more data: the trainer drains what there is."""
    while not loop.rollout_finished:
        endpoints = await store.endpoints(run_id)
        loop.rollout_finished = any(e.role == "rollout" and e.doing == FINISHED for e in endpoints)
        await asyncio.sleep(HEARTBEAT)


async def rollout(context: Context) -> None:
    from instar.rewards.factory import create_scorer
    from instar.rollout.agents import create_agent
    from instar.rollout.evaluate import Evaluator
    from instar.rollout.gateway_client import GatewayClient
    from instar.rollout.runner import RolloutRunner
    from instar.rollout.tasks import load_tasks
    from instar.trainer.monitor import Monitor

    config = context.config
    assert config.rollout is not None
    store = context.open_store()
    await context.announce(store, "loading tasks")
    # Out of the environment before any agent's code runs: what that starts inherits the rest.
    os.environ.pop(ENGINE_TOKEN)
    client = GatewayClient(os.environ[GATEWAY_URL], os.environ.pop(ADMIN_KEY))
    agent = create_agent(config.rollout.agent)
    monitor = Monitor(config.run_dir)
    evaluator = None
    if config.eval is not None:
        held_out = load_tasks(config.eval.tasks)
        evaluator = Evaluator(
            config, store, client, held_out, agent, create_scorer(config, held_out), monitor.record
        )
    try:
        if context.arguments.evaluate:
            assert evaluator is not None
            beating = asyncio.create_task(context.heartbeat(store, lambda: evaluator.doing))
            await _first(evaluator.evaluate_all(context.arguments.evaluate), context.stop.wait())
        else:
            tasks = load_tasks(config.rollout.tasks)
            runner = RolloutRunner(config, store, client, tasks, agent, create_scorer(config, tasks))
            runner.evaluator = evaluator
            beating = asyncio.create_task(context.heartbeat(store, lambda: runner.doing))
            await _first(runner.run(), context.stop.wait())
        beating.cancel()
    finally:
        await agent.close()
        await client.close()
        monitor.close()
    if not context.stop.is_set() and not context.arguments.evaluate:
        await context.announce(store, FINISHED)
    await store.close()


ROLES: dict[str, Callable[[Context], Awaitable[None]]] = {
    "engine": engine,
    "teacher": teacher,
    "gateway": gateway,
    "trainer": trainer,
    "rollout": rollout,
}


async def _first(*parts: Awaitable[object]) -> None:
    """Until the first part ends; its error is raised, the others are cancelled."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _when(event: asyncio.Event, action: Callable[[], None]) -> None:
    await event.wait()
    action()


if __name__ == "__main__":
    main()
