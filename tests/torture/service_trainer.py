"""A trainer that tests run in its own process, with a training service and a store that holds all its data.

`sys.argv` contains the path of the run's config and optionally the folder of a kill plan. The service's key
is read from its environment variable.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerFast  # noqa: F401 - import it before the fork, not in every child

from instar.backends.factory import apply_capabilities, create_backend
from instar.config import RunConfig, ScriptedEngineConfig
from instar.engines.base import Engine
from instar.engines.scripted import ScriptedEngine
from instar.store.sqlite import SqliteStore
from instar.sync.factory import create_sync_route
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor
from instar.trainer.publishing import PolicyPublisher
from tests.torture.kill_switch import KillSwitch, install_kill_points
from tests.torture.service_points import make_kill_points


async def train(config: RunConfig) -> None:
    """Train as the trainer role does, without the other roles."""
    assert isinstance(config.engine, ScriptedEngineConfig)
    store = SqliteStore(config.store_path)
    backend = create_backend(config)
    config, _ = apply_capabilities(config, backend.capabilities)
    engine = ScriptedEngine(config.model, config.engine)
    monitor = Monitor(config.run_dir, tensorboard=False)

    async def list_engines() -> list[Engine]:
        return [engine]

    trainer = Trainer(
        config,
        store=store,
        backend=backend,
        publisher=PolicyPublisher(await create_sync_route(config, backend, [engine]), list_engines),
        monitor=monitor,
    )
    trainer.is_rollout_finished = True
    try:
        await trainer.run()
    finally:
        monitor.close()
        await backend.close()
        await engine.close()
        await store.close()


def main() -> None:
    config = RunConfig.model_validate(msgspec.json.decode(Path(sys.argv[1]).read_bytes()))
    if sys.argv[2:]:
        install_kill_points(KillSwitch(Path(sys.argv[2])), make_kill_points(config.backend.type))
    asyncio.run(train(config))
