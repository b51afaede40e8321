"""An exception in a background task of a role ends the role or is reported."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from instar.cluster.base import RoleHandle
from instar.cluster.context import ENGINE_TOKEN_ENV, RoleContext
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.layout import RunFolder
from instar.cluster.role import trainer
from instar.config import RunConfig
from instar.errors import StoreFull
from instar.store.base import Run, Store
from instar.store.sqlite import SqliteStore
from instar.types import Endpoint, GroupStatus
from tests.tiny import make_tiny_model
from tests.unit.engines.test_conformance import scripted_engine, served

TOKEN = "t"


class FullStore(SqliteStore):
    """A store that cannot list the groups that are being scored, as only the trainer's rollout watcher does."""

    async def groups(self, *arguments: Any, **options: Any) -> Any:
        if GroupStatus.SCORING in arguments:
            raise StoreFull("the disk is full")
        return await super().groups(*arguments, **options)


class FullStoreContext(RoleContext):
    async def open_store(self) -> Store:
        return FullStore(self.config.store_path)


@pytest.fixture
async def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RoleContext]:
    """The trainer's context in a run with an engine that answers and a rollout that has finished."""
    monkeypatch.setenv(ENGINE_TOKEN_ENV, TOKEN)
    model = make_tiny_model(tmp_path / "model")
    folder = RunFolder(tmp_path / "run")
    config = RunConfig.model_validate(
        {
            "dir": folder.path,
            "model": {"name": str(model), "dtype": "fp32", "max_context": 256},
            "engine": {"type": "scripted"},
            "trainer": {"mode": "sync"},
            "rollout": {
                "tasks": {"type": "python", "function": "a:b"},
                "agent": {"type": "function", "function": "a:b"},
            },
        }
    )
    folder.create(config)
    store = SqliteStore(config.store_path)
    await store.put_run(Run("run", "run", {}))
    await store.put_endpoint(Endpoint("run", "rollout", "rollout", "", 1, "finished"))
    async with served(scripted_engine(model), TOKEN) as url:
        await EndpointDirectory(store, "run").register(RoleHandle("engine", "engine", url=url))
        yield FullStoreContext("trainer", folder, argparse.Namespace(name=None, fd=None, evaluate=None))
    await store.close()


async def test_trainer_whose_rollout_watcher_fails_ends_with_its_error(context: RoleContext) -> None:
    with pytest.raises(StoreFull, match="the disk is full"):
        await asyncio.wait_for(trainer(context), 30)
