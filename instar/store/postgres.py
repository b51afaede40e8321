"""The store on a PostgreSQL server, for runs that write from several hosts.

As in the SQLite store, each process has one writer, which groups concurrent writes into one commit, and
several readers. A lost connection is reopened. Then a read is repeated; a write is repeated once the server
has confirmed that the write was not committed.
"""

from __future__ import annotations

import os
from typing import Self

import psycopg

from instar.config import PostgresStoreConfig, RunConfig
from instar.store.base import Store
from instar.store.postgres_database import PostgresDatabase, PostgresWriteDatabase
from instar.store.postgres_schema import check_version
from instar.store.postgres_server import PostgresServer
from instar.store.reader import ReaderPool
from instar.store.writer import Writer


class PostgresStore(Store):
    """A store in a PostgreSQL schema, which is created or migrated first unless ``read_only``."""

    def __init__(self, server: PostgresServer, *, readers: int = 4, read_only: bool = False) -> None:
        if read_only:
            _check_readable(server)
        name, timeout = server.name, server.timeout
        super().__init__(
            name,
            None if read_only else Writer(_open_for_writing(server), name, retry_timeout=timeout),
            ReaderPool(lambda: _open_for_reading(server), name, threads=readers, retry_timeout=timeout),
        )

    @classmethod
    def from_config(cls, config: RunConfig, *, read_only: bool = False) -> Self:
        settings = config.store
        assert isinstance(settings, PostgresStoreConfig)
        password_env = settings.password_env_name(os.environ)
        password = os.environ[password_env] if password_env else None
        server = PostgresServer(settings.url, settings.db_schema, settings.timeout, password)
        return cls(server, readers=settings.pool, read_only=read_only)


def _open_for_writing(server: PostgresServer) -> PostgresWriteDatabase:
    try:
        return PostgresWriteDatabase.open(server)
    except psycopg.Error as error:
        raise server.translate(error) from error


def _open_for_reading(server: PostgresServer) -> PostgresDatabase:
    try:
        return PostgresDatabase(server, server.connect("instar", read_only=True))
    except psycopg.Error as error:
        raise server.translate(error) from error


def _check_readable(server: PostgresServer) -> None:
    """Check that the store can be read. There are no retries: a person is usually waiting for a store that is
    opened for reading."""
    try:
        connection = server.connect("instar", read_only=True, retry_timeout=0.0)
        try:
            check_version(connection, server)
        finally:
            connection.close()
    except psycopg.Error as error:
        raise server.translate(error) from error
