"""Roles that move are found again through the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from instar.cluster.base import Role
from instar.cluster.directory import Directory, Engines, FollowedPool
from instar.engines.base import Engine
from instar.errors import EngineUnavailable
from instar.store.base import Store
from instar.store.sqlite import SqliteStore
from tests.tiny import make_tiny_model
from tests.unit.engines.conformance import collect, ids_of
from tests.unit.engines.test_conformance import scripted_engine, served

TOKEN = "t"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = SqliteStore(tmp_path / "store.db")
    yield made
    await made.close()


def at(url: str, name: str = "engine-0") -> Role:
    return Role("engine", name, url=url)


async def test_the_trainers_engines_are_where_the_store_says(store: Store, tiny: Path) -> None:
    directory = Directory(store, "run")
    engines = Engines(directory, TOKEN)
    with pytest.raises(EngineUnavailable, match="no engine of the run"):
        await engines.first(timeout=0.1)
    async with served(scripted_engine(tiny), TOKEN) as one, served(scripted_engine(tiny), TOKEN) as two:
        await directory.enter(at(one))
        (first,) = await engines.first(5)
        assert await engines.current() == [first], "a connection is kept"
        await directory.enter(at("http://127.0.0.1:9", "engine-1"))
        assert await engines.current() == [first], "one that has not answered yet is left out"
        await directory.enter(at(two))
        (moved,) = await engines.current()
        assert moved is not first
        assert (await moved.status()).version == 0
    assert await engines.current() == [moved], "one that was there and is away is kept"
    await engines.close()


async def test_an_engine_that_is_silent_keeps_nobody_waiting(store: Store, tiny: Path) -> None:
    directory = Directory(store, "run")
    engines = Engines(directory, TOKEN, skip_silent=True)
    async with served(scripted_engine(tiny), TOKEN) as one:
        async with served(scripted_engine(tiny), TOKEN) as two:
            await directory.enter(at(one))
            await directory.enter(at(two, "engine-1"))
            first, second = await engines.current()
        assert await engines.current() == [first]
    assert await engines.current() == [first, second], "the last ones are not given up"
    await engines.close()


async def answers(engine: Engine) -> bool:
    try:
        return len(ids_of(await collect(engine, [5, 6], max_tokens=4))) == 4
    except EngineUnavailable:
        return False


async def test_the_pool_follows_an_engine_that_moves(store: Store, tiny: Path) -> None:
    directory = Directory(store, "run")
    pool = FollowedPool(directory, TOKEN)
    starting = asyncio.create_task(pool.start(10))
    async with served(scripted_engine(tiny), TOKEN) as one:
        await directory.enter(at(one))
        await starting
        following = asyncio.create_task(pool.follow())
        assert await answers(pool)
    async with served(scripted_engine(tiny), TOKEN) as two:
        await directory.enter(at(two))
        async with asyncio.timeout(10):
            while not await answers(pool):  # noqa: ASYNC110 - it looks now and then
                await asyncio.sleep(0.05)
        assert len(pool.members) == 1
        following.cancel()
        await pool.close()
