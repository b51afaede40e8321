"""Tests for the PostgreSQL store on a real server: conformance, shared commits, full disks and an index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from instar.errors import ConflictError, StoreFull
from instar.store.postgres import PostgresStore
from instar.store.postgres_server import PostgresServer
from tests.postgres import PostgresTestServer

from .conformance import StoreConformance, StoreFactory
from .conformance_forgetting import add_live_session
from .factories import RUN_ID, make_call, make_session


@pytest.fixture
def server(postgres: PostgresTestServer) -> PostgresServer:
    return PostgresServer(postgres.socket_url, postgres.make_schema_name(), timeout=30.0)


class TestPostgresStore(StoreConformance):
    @pytest.fixture
    def open_store(self, postgres: PostgresTestServer) -> StoreFactory:
        server = PostgresServer(postgres.socket_url, "conformance", timeout=30.0)
        postgres.delete_rows(server.schema)
        return lambda: PostgresStore(server)


@pytest.fixture
async def store(server: PostgresServer) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(server)
    yield store
    await store.close()


async def test_concurrent_writes_share_commits_and_fail_separately(store: PostgresStore) -> None:
    await store.open_session(make_session())
    commits_before = store.commit_count
    writes = [
        store.add_calls([make_call(f"new-{i}"), make_call("duplicate" if i % 2 else f"other-{i}")])
        for i in range(40)
    ]
    results = await asyncio.gather(*writes, return_exceptions=True)
    # Of the 20 writes with the duplicate id, only the first succeeds.
    assert sum(isinstance(result, ConflictError) for result in results) == 19
    assert sum(result is None for result in results) == 21
    assert len(await store.calls("s")) == 42
    assert store.commit_count - commits_before <= 5


async def test_write_on_a_full_disk_fails_separately(
    postgres: PostgresTestServer, server: PostgresServer, store: PostgresStore
) -> None:
    """A trigger raises a full-disk error for large prompts."""
    await store.open_session(make_session())
    postgres.query(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$",
        schema=server.schema,
    )
    postgres.query(
        "CREATE TRIGGER full_disk BEFORE INSERT ON calls FOR EACH ROW "
        "WHEN (length(NEW.prompt_ids) > 1000) EXECUTE FUNCTION full_disk()",
        schema=server.schema,
    )
    sizes = [10, 20, 1000, 30, 2000, 40]
    writes = [
        store.add_calls([make_call(str(size), prompt_ids=np.arange(size, dtype=np.int32))]) for size in sizes
    ]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [isinstance(result, StoreFull) for result in results] == [size >= 1000 for size in sizes]
    assert [call.call_id for call in await store.calls("s")] == ["10", "20", "30", "40"]


async def test_sessions_by_tail_query_uses_its_index(
    postgres: PostgresTestServer, server: PostgresServer, store: PostgresStore
) -> None:
    """The gateway runs this query for each call, so it must not scan the table."""
    await store.open_session(make_session())
    await store.add_calls(
        [make_call(str(i)) for i in range(300)], tail_keys={str(i): i.to_bytes(16, "big") for i in range(300)}
    )
    postgres.query("ANALYZE calls", schema=server.schema)
    query = "SELECT seq FROM calls WHERE tail_key = '\\x00' ORDER BY seq DESC LIMIT 1"
    plan = str(postgres.query(f"EXPLAIN {query}", schema=server.schema))
    assert "calls_by_tail" in plan
    assert "Sort" not in plan


async def test_forgotten_texts_are_erased_from_the_table_files(
    postgres: PostgresTestServer, server: PostgresServer, store: PostgresStore
) -> None:
    def find_texts() -> list[str]:
        postgres.query("CHECKPOINT")
        files = [file for file in (postgres.folder / "data" / "base").rglob("*") if file.is_file()]
        content = b"".join(file.read_bytes() for file in files)
        return [text for text in ("private text", "other text") if text.encode() in content]

    await add_live_session(store, "a", "private text")
    await add_live_session(store, "b", "other text")
    assert find_texts() == ["private text", "other text"]
    await store.forget_sessions(RUN_ID, ["a"])
    assert await store.erase_deleted(rewrite=False)
    assert await store.erase_deleted(rewrite=True)
    assert find_texts() == ["other text"]
