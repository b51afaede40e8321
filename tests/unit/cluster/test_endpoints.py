"""Tests that engines which move to a different address are found through the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from instar.cluster.base import RoleHandle
from instar.cluster.endpoints import DiscoveredEnginePool, EndpointDirectory, EngineConnections
from instar.engines.base import Engine
from instar.errors import EngineUnavailable
from instar.store.base import Store
from instar.store.sqlite import SqliteStore
from tests.tiny import make_tiny_model
from tests.unit.engines.conformance import collect, get_ids
from tests.unit.engines.test_conformance import create_scripted_engine, serve_engine

TOKEN = "t"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = SqliteStore(tmp_path / "store.db")
    yield store
    await store.close()


def make_handle(url: str, name: str = "engine-0") -> RoleHandle:
    return RoleHandle("engine", name, url=url)


async def test_engine_connections_follow_the_endpoints_in_the_store(store: Store, tiny: Path) -> None:
    directory = EndpointDirectory(store, "run")
    engines = EngineConnections(directory, TOKEN, 1)
    with pytest.raises(EngineUnavailable, match="no engine responded"):
        await engines.wait_for_first(timeout=0.1)
    async with (
        serve_engine(create_scripted_engine(tiny), TOKEN) as first_url,
        serve_engine(create_scripted_engine(tiny), TOKEN) as second_url,
    ):
        await directory.register(make_handle(first_url))
        (first,) = await engines.wait_for_first(5)
        assert await engines.refresh() == [first], "a connection is kept"
        await directory.register(make_handle("http://127.0.0.1:9", "engine-1"))
        assert await engines.refresh() == [first], "an engine that has not responded yet is excluded"
        await directory.register(make_handle(second_url))
        (moved,) = await engines.refresh()
        assert moved is not first
        assert (await moved.status()).version == 0
    assert await engines.refresh() == [moved], "an engine that stopped responding is kept"
    await engines.close()


async def test_engine_connections_skip_an_unresponsive_engine_unless_all_are_unresponsive(
    store: Store, tiny: Path
) -> None:
    directory = EndpointDirectory(store, "run")
    engines = EngineConnections(directory, TOKEN, 1, skip_unresponsive=True)
    async with serve_engine(create_scripted_engine(tiny), TOKEN) as first_url:
        async with serve_engine(create_scripted_engine(tiny), TOKEN) as second_url:
            await directory.register(make_handle(first_url))
            await directory.register(make_handle(second_url, "engine-1"))
            first, second = await engines.refresh()
        assert await engines.refresh() == [first]
    assert await engines.refresh() == [first, second], "if none responds, all are kept"
    await engines.close()


async def can_generate(engine: Engine) -> bool:
    try:
        return len(get_ids(await collect(engine, [5, 6], max_tokens=4))) == 4
    except EngineUnavailable:
        return False


async def test_engine_pool_follows_an_engine_that_moves(store: Store, tiny: Path) -> None:
    directory = EndpointDirectory(store, "run")
    pool = DiscoveredEnginePool(directory, TOKEN)
    connect_task = asyncio.create_task(pool.connect(10))
    async with serve_engine(create_scripted_engine(tiny), TOKEN) as first_url:
        await directory.register(make_handle(first_url))
        await connect_task
        watch_task = asyncio.create_task(pool.watch_endpoints())
        assert await can_generate(pool)
    async with serve_engine(create_scripted_engine(tiny), TOKEN) as second_url:
        await directory.register(make_handle(second_url))
        async with asyncio.timeout(10):
            while not await can_generate(pool):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)
        assert len(pool.members) == 1
        watch_task.cancel()
        await pool.close()
