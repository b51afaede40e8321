"""Tests that an exception in a role's background task stops the role or is logged."""

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
from instar.cluster.roles.trainer import run_trainer
from instar.cluster.supervisor import LEASE_ENV
from instar.cluster.tasks import background_tasks, cancel_tasks, run_until_first, wait_forever
from instar.config import RunConfig
from instar.errors import StoreFull
from instar.store.base import Run, Store
from instar.store.sqlite import SqliteStore
from instar.types import Endpoint, GroupStatus
from tests.tiny import make_tiny_model
from tests.unit.engines.test_conformance import create_scripted_engine, serve_engine

TOKEN = "t"


class FullStore(SqliteStore):
    """A store that raises StoreFull when the trainer's rollout watcher lists the SCORING groups."""

    async def groups(self, *arguments: Any, **options: Any) -> Any:
        if GroupStatus.SCORING in arguments:
            raise StoreFull("the disk is full")
        return await super().groups(*arguments, **options)


class FullStoreContext(RoleContext):
    async def open_store(self) -> Store:
        return FullStore(self.config.store_path)


@pytest.fixture
async def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RoleContext]:
    """The trainer's context in a run with a working engine, a finished rollout and a full store."""
    monkeypatch.setenv(ENGINE_TOKEN_ENV, TOKEN)
    monkeypatch.setenv(LEASE_ENV, "1")
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
    async with serve_engine(create_scripted_engine(model), TOKEN) as url:
        await EndpointDirectory(store, "run").register(RoleHandle("engine", "engine", url=url))
        yield FullStoreContext("trainer", folder, argparse.Namespace(name=None, fd=None, evaluate=None))
    await store.close()


async def test_trainer_with_a_failing_rollout_watcher_raises_its_error(context: RoleContext) -> None:
    with pytest.raises(StoreFull, match="the disk is full"):
        await asyncio.wait_for(run_trainer(context), 30)


async def fail(error: Exception) -> None:
    raise error


async def test_background_tasks_with_a_failing_task_cancels_the_body_and_raises_its_error() -> None:
    with pytest.raises(StoreFull, match="full"):
        async with background_tasks(fail(StoreFull("full")), wait_forever()):
            await asyncio.wait_for(wait_forever(), 10)


async def test_background_tasks_with_a_failing_body_awaits_the_tasks_and_raises_its_error() -> None:
    ended: list[str] = []

    async def watch() -> None:
        try:
            await wait_forever()
        finally:
            await asyncio.sleep(0)
            ended.append("watch")

    async def fail_later() -> None:
        await asyncio.sleep(0)
        raise ValueError("the body failed")

    with pytest.raises(ValueError, match="the body failed"):
        async with background_tasks(watch()):
            await fail_later()
    assert ended == ["watch"]


async def test_run_until_first_logs_the_error_of_a_task_it_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await wait_forever()
        finally:
            raise ValueError("could not clean up")

    await run_until_first(asyncio.sleep(0), fail_when_cancelled())
    assert "could not clean up" in caplog.text


async def test_cancel_tasks_logs_a_failure_that_was_not_awaited(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(fail(ValueError("lost")))
    await asyncio.sleep(0)
    await cancel_tasks([task])
    assert "lost" in caplog.text
