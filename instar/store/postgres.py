"""The store on a PostgreSQL server, for runs that write from several hosts.

As in the embedded one, each process has one writer, which groups concurrent writes into one commit, and
readers beside it. A connection that is lost is made again: a read is repeated, and a write too once the
server has said that it was not committed.
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
    """Opens the schema, making or migrating it first unless ``read_only``."""

    def __init__(self, server: PostgresServer, *, readers: int = 4, read_only: bool = False) -> None:
        if read_only:
            _check_readable(server)
        name, patience = server.name, server.timeout
        super().__init__(
            name,
            None if read_only else Writer(_open_for_writing(server), name, retry_timeout=patience),
            ReaderPool(lambda: _open_for_reading(server), name, threads=readers, retry_timeout=patience),
        )

    @classmethod
    def from_config(cls, config: RunConfig, *, read_only: bool = False) -> Self:
        section = config.store
        assert isinstance(section, PostgresStoreConfig)
        variable = section.password_env_name(os.environ)
        password = os.environ[variable] if variable else None
        server = PostgresServer(section.url, section.db_schema, section.timeout, password)
        return cls(server, readers=section.pool, read_only=read_only)


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
    """At once: who only reads is a person who waits."""
    try:
        connection = server.connect("instar", read_only=True, retry_timeout=0.0)
        try:
            check_version(connection, server)
        finally:
            connection.close()
    except psycopg.Error as error:
        raise server.translate(error) from error
