"""Schemas of older versions are migrated. Newer, damaged and foreign schemas are rejected with advice.

Passwords come from the environment and never appear in messages.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import psycopg
import pytest

from instar.cli.config_file import validate
from instar.cluster.layout import public_settings
from instar.config import PostgresStoreConfig, RunConfig
from instar.errors import ConfigError, StoreCorrupt, StoreError, StoreTooNew
from instar.store.base import Run
from instar.store.factory import open_store
from instar.store.postgres import PostgresStore
from instar.store.postgres_schema import check_version, create_or_migrate
from instar.store.postgres_server import PostgresServer
from instar.store.schema import TABLES, VERSION
from tests.postgres import PASSWORD, PostgresTestServer

from .factories import POLICY_ID, RUN_ID, make_call, make_session
from .test_sqlite_files import FAILING_MIGRATION, NEXT_MIGRATION


@pytest.fixture
def server(postgres: PostgresTestServer) -> PostgresServer:
    return PostgresServer(postgres.socket_url, postgres.make_schema_name(), timeout=10.0)


async def fill_store(server: PostgresServer) -> None:
    store = PostgresStore(server)
    await store.open_session(make_session())
    await store.add_calls([make_call(str(i)) for i in range(5)])
    await store.close()


def assert_open_fails(server: PostgresServer, error: type[StoreError], *words: str) -> None:
    """Check that the store can be opened neither for writing nor for reading."""
    for read_only in (False, True):
        with pytest.raises(error) as caught:
            PostgresStore(server, read_only=read_only)
        for word in (*words, server.schema):
            assert word in str(caught.value)


async def test_open_store_of_a_newer_version_raises(
    postgres: PostgresTestServer, server: PostgresServer
) -> None:
    await fill_store(server)
    postgres.query("UPDATE instar_store SET version = %s", VERSION + 6, schema=server.schema)
    assert_open_fails(server, StoreTooNew, f"version {VERSION + 6}", f"up to {VERSION}", "upgrade Instar")


def test_open_schema_of_another_program_raises(postgres: PostgresTestServer, server: PostgresServer) -> None:
    postgres.query(f"CREATE SCHEMA {server.schema}")
    postgres.query("CREATE TABLE bookmarks (url TEXT)", schema=server.schema)
    assert_open_fails(server, StoreError, "another program", "store.db_schema")
    tables = postgres.query("SELECT tablename FROM pg_tables WHERE schemaname = %s", server.schema)
    assert tables == [("bookmarks",)]


async def test_open_store_without_a_table_raises(
    postgres: PostgresTestServer, server: PostgresServer
) -> None:
    await fill_store(server)
    postgres.query("DROP TABLE claims", schema=server.schema)
    assert_open_fails(server, StoreCorrupt, "the table claims is missing")


async def test_read_only_store_creates_and_writes_nothing(
    postgres: PostgresTestServer, server: PostgresServer
) -> None:
    with pytest.raises(StoreError, match="no store found in"):
        PostgresStore(server, read_only=True)
    assert postgres.query("SELECT 1 FROM pg_namespace WHERE nspname = %s", server.schema) == []
    await fill_store(server)
    store = PostgresStore(server, read_only=True)
    assert len(await store.calls("s")) == 5
    with pytest.raises(StoreError, match="opened read-only"):
        await store.add_calls([make_call("late")])
    await store.close()


async def test_postgres_runs_sqlite_migrations(postgres: PostgresTestServer, server: PostgresServer) -> None:
    """A failed migration changes nothing, and `check_version` does not migrate."""
    await fill_store(server)
    connection = server.connect("test")
    with pytest.raises(psycopg.errors.UndefinedTable):
        create_or_migrate(connection, server, version=VERSION + 1, migrations=FAILING_MIGRATION)
    with pytest.raises(
        StoreError, match=rf"version {VERSION}, but this version of Instar requires {VERSION + 1}"
    ):
        check_version(connection, server, version=VERSION + 1)
    create_or_migrate(connection, server, version=VERSION + 1, migrations=NEXT_MIGRATION)
    check_version(connection, server, version=VERSION + 1)
    connection.close()
    assert postgres.query("SELECT note FROM runs", schema=server.schema) == []
    assert postgres.query("SELECT COUNT(*) FROM calls", schema=server.schema) == [(5,)]


async def test_created_columns_match_the_declarations(
    postgres: PostgresTestServer, server: PostgresServer
) -> None:
    """Only the tables with counts have an additional column, ``backend``."""
    await fill_store(server)
    for table in TABLES:
        columns = postgres.query(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
            "AND column_name != 'backend' ORDER BY ordinal_position",
            server.schema,
            table.name,
        )
        assert [name for (name,) in columns] == list(table.columns)


# --- connecting to the server -----------------------------------------------------------------------


def make_config(postgres: PostgresTestServer, folder: Path, **settings: str) -> RunConfig:
    section = PostgresStoreConfig(url=postgres.tcp_url, db_schema=postgres.make_schema_name(), **settings)
    return RunConfig(name="demo", dir=folder / "demo", store=section)


async def test_open_store_opens_the_configured_store(
    postgres: PostgresTestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(postgres, tmp_path, password_env="STORE_PASSWORD")
    monkeypatch.setenv("PGPASSWORD", "password of another server")
    monkeypatch.setenv("STORE_PASSWORD", PASSWORD)
    assert isinstance(config.store, PostgresStoreConfig)
    with pytest.raises(StoreError, match="no store found in"):
        open_store(config, read_only=True)
    store = open_store(config)
    monkeypatch.delenv("STORE_PASSWORD")  # the store keeps it for later connections
    await store.put_run(Run(RUN_ID, POLICY_ID, {}))
    assert len(await store.runs()) == 1
    await store.close()
    assert PASSWORD not in json.dumps(public_settings(config))


@pytest.mark.parametrize("password", ["wrong-password", None])
def test_wrong_or_missing_password_raises_without_retries(
    postgres: PostgresTestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str | None
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    if password is not None:
        monkeypatch.setenv("INSTAR_POSTGRES_PASSWORD", password)
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"store\.password_env") as caught:
        open_store(make_config(postgres, tmp_path))
    assert "wrong-password" not in str(caught.value)
    assert time.monotonic() - started < PostgresStoreConfig().timeout


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret-value@host/instar",
        "postgresql://host/instar?user=me&password=secret-value",
        "host=h user=me password = secret-value",
    ],
)
def test_url_with_a_password_raises(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url: .*password_env") as caught:
        validate({"store": {"type": "postgres", "url": url}}, "run.yaml")
    assert "secret-value" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql:///instar", "postgresql://me@[::1]:5432/instar?passfile=/x", "host=h"]
)
def test_url_without_a_password_is_accepted(url: str) -> None:
    assert PostgresStoreConfig(url=url).url == url


def test_missing_database_raises_without_retries(postgres: PostgresTestServer) -> None:
    url = postgres.socket_url.replace("/postgres?", "/missing?")
    with pytest.raises(StoreError, match=r'"missing" does not exist.*createdb'):
        PostgresStore(PostgresServer(url, "instar", timeout=600.0))
