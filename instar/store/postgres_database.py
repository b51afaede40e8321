"""PostgreSQL connections that implement `Database`.

A writer that loses its connection during a commit must find out whether the transaction was committed. For
this, each writer has a row with the number of its last transaction. After reconnecting, the writer terminates
the server process of the old connection and reads the row.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import psycopg

from instar.errors import StoreError
from instar.store.database import Cursor, Values
from instar.store.postgres_schema import WRITERS, create_or_migrate
from instar.store.postgres_server import (
    PostgresConnection,
    PostgresServer,
    TransactionNotCommitted,
    format_error,
    is_connection_lost,
    is_transient,
)
from instar.store.table import Table

WRITER_ROW_MAX_AGE_SECONDS = 24 * 3600.0
_PARAMETER = re.compile(r"\?|(?<!:):([a-z_][a-z_0-9]*)")


class PostgresDatabase:
    """A PostgreSQL connection for reading, and the base class of the connection for writing."""

    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error,)
    for_update: ClassVar[str] = " FOR NO KEY UPDATE"
    for_delete: ClassVar[str] = " FOR UPDATE"
    json_rows_sql: ClassVar[str] = "COALESCE(json_agg(json_build_array({})), '[]')::text"
    json_array_sql: ClassVar[str] = "SELECT json_array_elements_text({}::json)"

    def __init__(self, server: PostgresServer, connection: PostgresConnection) -> None:
        self._server = server
        self._connection = connection

    def execute(self, sql: str, values: Values = (), /) -> Cursor:
        return self._connection.execute(_to_psycopg(sql), values, binary=True)

    def insert(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            self._connection.cursor().executemany(_to_psycopg(table.build_insert_sql(1)), rows)

    def insert_autocommit(self, table: Table, rows: Sequence[Sequence[Any]]) -> bool:
        return False

    def lock_name(self, name: str) -> None:
        self.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (f"{self._server.schema} {name}",)
        )

    def begin_read(self) -> None:
        self._connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def is_connection_lost(self, error: Exception) -> bool:
        return self._connection.closed or is_connection_lost(error)

    def begin(self) -> None:
        raise StoreError(f"cannot write to {self._server.name}: it was opened read-only")

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        # If the connection is lost, the server has already rolled back.
        with contextlib.suppress(psycopg.Error):
            self._connection.execute("ROLLBACK")

    def rollback_savepoint(self) -> None:
        self.execute("ROLLBACK TO job")

    def on_batch_finished(self) -> None: ...

    def is_rolled_back(self, error: Exception) -> bool:
        return self.is_connection_lost(error) or is_transient(error)

    def is_global_failure(self, error: Exception) -> bool:
        return self.is_connection_lost(error)

    def is_transient(self, error: Exception) -> bool:
        return self.is_connection_lost(error) or is_transient(error)

    def translate(self, error: Exception) -> StoreError:
        return self._server.translate(error)

    def close(self) -> None:
        self._connection.close()


class PostgresWriteDatabase(PostgresDatabase):
    """A PostgreSQL connection for writing, which detects whether an interrupted commit succeeded."""

    def __init__(self, server: PostgresServer, connection: PostgresConnection, writer_name: str) -> None:
        super().__init__(server, connection)
        self._writer_name = writer_name
        self._transaction_number = 0

    @classmethod
    def open(cls, server: PostgresServer) -> PostgresWriteDatabase:
        """Connect, create or migrate the tables, and return the connection. Does not translate errors."""
        writer_name = f"instar {secrets.token_hex(8)}"
        connection = server.connect(writer_name)
        try:
            create_or_migrate(connection, server)
            db = cls(server, connection, writer_name)
            db.register()
        except BaseException:  # any failure: close the connection, then re-raise
            connection.close()
            raise
        return db

    def register(self) -> None:
        """Insert this writer's row before the first transaction, because only an existing row can be locked.
        Also remove rows more than a day old that writers left behind when they exited without `close`."""
        self.execute(
            WRITERS.insert_sql,
            {"writer": self._writer_name, "number": self._transaction_number, "at": time.time()},
        )
        self.execute(
            "DELETE FROM writers WHERE at < ? "
            "AND writer NOT IN (SELECT application_name FROM pg_stat_activity)",
            (time.time() - WRITER_ROW_MAX_AGE_SECONDS,),
        )

    def begin(self) -> None:
        if self._connection.closed:
            self._reconnect()
        self._transaction_number += 1
        # One message, so one round trip. Formatting is safe: we generate the name, and the rest are numbers.
        begin = (
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; INSERT INTO writers (writer, number, at) "
            f"VALUES ('{self._writer_name}', {self._transaction_number}, {time.time()}) "
            "ON CONFLICT (writer) DO UPDATE SET number = excluded.number, at = excluded.at"
        )
        self._connection.execute(begin.encode(), prepare=False)

    def commit(self) -> None:
        try:
            result = self._connection.execute("COMMIT", prepare=False)
        except psycopg.Error as error:
            if not self.is_connection_lost(error):
                raise
            if not self._reconnect_and_check_commit(error):
                raise TransactionNotCommitted(format_error(error)) from error
            return
        if result.statusmessage != "COMMIT":
            raise StoreError(f"{self._server.name} answered COMMIT with {result.statusmessage}")

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):  # another writer removes the row later
            self.execute("DELETE FROM writers WHERE writer = ?", (self._writer_name,))
        super().close()

    def _reconnect(self) -> None:
        self._connection.close()
        self._connection = self._server.connect(self._writer_name)
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = ? AND datname = current_database() AND pid != pg_backend_pid()",
            (self._writer_name,),
        )

    def _reconnect_and_check_commit(self, cause: psycopg.Error) -> bool:
        """Reconnect, and return True if the server committed the transaction. Wait if the commit is still in
        progress. Raises StoreError if the outcome is unknown. ``cause`` is the commit's error."""
        deadline = time.monotonic() + self._server.timeout
        while True:
            try:
                self._reconnect()
                row = self.execute(
                    "SELECT number FROM writers WHERE writer = ? FOR UPDATE", (self._writer_name,)
                ).fetchone()
                return row is not None and row["number"] == self._transaction_number
            except psycopg.Error as error:
                if not self.is_connection_lost(error) or time.monotonic() > deadline:
                    raise StoreError(
                        f"the connection to {self._server.name} was lost during a commit "
                        f"({format_error(cause)}) and could not be reopened ({format_error(error)}): "
                        "the last writes may or may not have been stored"
                    ) from error


@cache
def _to_psycopg(sql: str) -> bytes:
    text = _PARAMETER.sub(
        lambda match: "%s" if match[1] is None else f"%({match[1]})s", sql.replace("%", "%%")
    )
    return text.encode()
