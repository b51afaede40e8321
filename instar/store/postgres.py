"""The store on a PostgreSQL server, for runs that write from several hosts.

As in the SQLite store, each process has one writer, which groups concurrent writes into one commit, and
several readers. If a connection is lost, reads are retried on a new one. Writes are retried only if the
server confirms that they were not committed.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from typing import Self

import psycopg

from instar.config import PostgresStoreConfig, RunConfig
from instar.store.base import Store
from instar.store.database import translate_errors
from instar.store.postgres_database import PostgresDatabase, PostgresWriteDatabase
from instar.store.postgres_schema import MIGRATION_TIMEOUT_SECONDS, check_version
from instar.store.postgres_server import PostgresServer
from instar.store.reader import ReaderPool
from instar.store.schema import TABLES_WITH_TEXT
from instar.store.writer import Writer


class PostgresStore(Store):
    """A store in a PostgreSQL schema. Unless ``read_only``, the schema is created or migrated first."""

    def __init__(self, server: PostgresServer, *, reader_threads: int = 4, read_only: bool = False) -> None:
        self._server = server
        name, timeout, writer = server.name, server.timeout, None
        with translate_errors(psycopg.Error, server.translate):
            if read_only:
                # Do not retry: a command that only reads should report the error immediately.
                with closing(server.connect("instar", read_only=True, retry_timeout=0.0)) as connection:
                    check_version(connection, server)
            else:
                writer = Writer(PostgresWriteDatabase.open(server), name, retry_timeout=timeout)
        reader_pool = ReaderPool(
            lambda: _open_for_reading(server), name, threads=reader_threads, retry_timeout=timeout
        )
        super().__init__(name, writer, reader_pool)

    async def erase_deleted(self, *, rewrite: bool) -> bool:
        """Make the space of deleted rows available again. The server overwrites their content when it uses
        the space; with ``rewrite``, the content is removed at once, and tables are locked meanwhile."""

        def vacuum() -> None:
            with (
                translate_errors(psycopg.Error, self._server.translate),
                closing(self._server.connect("instar")) as connection,
            ):
                connection.response_timeout = MIGRATION_TIMEOUT_SECONDS
                connection.execute("SET statement_timeout = 0")
                tables = ", ".join(table.name for table in TABLES_WITH_TEXT)
                connection.execute(f"VACUUM {'FULL ' if rewrite else ''}{tables}".encode())

        await asyncio.to_thread(vacuum)
        return True

    @classmethod
    def from_config(cls, config: RunConfig, *, read_only: bool = False) -> Self:
        settings = config.store
        assert isinstance(settings, PostgresStoreConfig)
        password_env = settings.password_env_name(os.environ)
        password = os.environ[password_env] if password_env else None
        server = PostgresServer(settings.url, settings.db_schema, settings.timeout, password)
        return cls(server, reader_threads=settings.pool, read_only=read_only)


def _open_for_reading(server: PostgresServer) -> PostgresDatabase:
    with translate_errors(psycopg.Error, server.translate):
        return PostgresDatabase(server, server.connect("instar", read_only=True))
