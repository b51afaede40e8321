"""A connection as the store's queries, readers and writer want it.

A writer that lost its connection while it committed has to know what became of that. So each writer has a
row of its own, with the number of its last transaction: on a new connection, the row tells whether that
one was committed. What the old connection still holds is ended first.
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
    NotCommitted,
    PostgresConnection,
    PostgresServer,
    error_text,
    is_connection_lost,
    is_transient,
)
from instar.store.schema import Table

FORGOTTEN_AFTER = 24 * 3600.0
_PARAMETER = re.compile(r"\?|(?<!:):([a-z_][a-z_0-9]*)")


class PostgresDatabase:
    """A `Database`, for reading."""

    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error,)
    for_update: ClassVar[str] = " FOR NO KEY UPDATE"
    json_rows: ClassVar[str] = "COALESCE(json_agg(json_build_array({})), '[]')::text"
    json_texts: ClassVar[str] = "SELECT json_array_elements_text({}::json)"

    def __init__(self, server: PostgresServer, connection: PostgresConnection) -> None:
        self._server = server
        self._connection = connection

    def execute(self, sql: str, values: Values = (), /) -> Cursor:
        return self._connection.execute(_translated(sql), values, binary=True)

    def insert(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Sent together, so that many rows wait for one answer."""
        if rows:
            self._connection.cursor().executemany(_translated(table.insert_many(1)), rows)

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
        raise StoreError(f"{self._server.name} was opened for reading only")

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        # A connection that is lost has undone it already.
        with contextlib.suppress(psycopg.Error):
            self._connection.execute("ROLLBACK")

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
    """A `Database` with transactions that are known to be committed or not, whatever the network does."""

    def __init__(self, server: PostgresServer, connection: PostgresConnection, writer: str) -> None:
        super().__init__(server, connection)
        self._writer = writer
        self._number = 0

    @classmethod
    def open(cls, server: PostgresServer) -> PostgresWriteDatabase:
        """Makes or migrates the tables first. Raises psycopg's errors."""
        writer = f"instar {secrets.token_hex(8)}"
        connection = server.connect(writer)
        try:
            create_or_migrate(connection, server)
            db = cls(server, connection, writer)
            db.register()
        except BaseException:  # any failure: close the connection, then re-raise
            connection.close()
            raise
        return db

    def register(self) -> None:
        """Before the first transaction: a row that is there can be waited for. Those of writers that ended
        without a word are removed."""
        self.execute(WRITERS.insert, {"writer": self._writer, "number": self._number, "at": time.time()})
        self.execute(
            "DELETE FROM writers WHERE at < ? "
            "AND writer NOT IN (SELECT application_name FROM pg_stat_activity)",
            (time.time() - FORGOTTEN_AFTER,),
        )

    def begin(self) -> None:
        if self._connection.closed:
            self._reconnect()
        self._number += 1
        # In one message. The name is ours, and the rest numbers.
        begin = (
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; INSERT INTO writers (writer, number, at) "
            f"VALUES ('{self._writer}', {self._number}, {time.time()}) "
            "ON CONFLICT (writer) DO UPDATE SET number = excluded.number, at = excluded.at"
        )
        self._connection.execute(begin.encode(), prepare=False)

    def commit(self) -> None:
        try:
            done = self._connection.execute("COMMIT", prepare=False)
        except psycopg.Error as error:
            if not self.is_connection_lost(error):
                raise
            if not self._was_committed(error):
                raise NotCommitted(error_text(error)) from error
            return
        if done.statusmessage != "COMMIT":
            raise StoreError(f"{self._server.name} undid a transaction: {done.statusmessage}")

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):  # rows that are left are removed with the old ones
            self.execute("DELETE FROM writers WHERE writer = ?", (self._writer,))
        super().close()

    def _reconnect(self) -> None:
        self._connection.close()
        self._connection = self._server.connect(self._writer)
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = ? AND datname = current_database() AND pid != pg_backend_pid()",
            (self._writer,),
        )

    def _was_committed(self, cause: psycopg.Error) -> bool:
        """Asked of the server; waits for a transaction that it has not ended yet."""
        deadline = time.monotonic() + self._server.timeout
        while True:
            try:
                self._reconnect()
                row = self.execute(
                    "SELECT number FROM writers WHERE writer = ? FOR UPDATE", (self._writer,)
                ).fetchone()
                return row is not None and row["number"] == self._number
            except psycopg.Error as error:
                if not self.is_connection_lost(error) or time.monotonic() > deadline:
                    raise StoreError(
                        f"{self._server.name} was lost while it committed ({error_text(cause)}) and has not "
                        f"come back ({error_text(error)}): it is not known whether the last writes are stored"
                    ) from error


@cache
def _translated(sql: str) -> bytes:
    """``?`` and ``:name`` as psycopg writes them."""
    text = _PARAMETER.sub(
        lambda found: "%s" if found[1] is None else f"%({found[1]})s", sql.replace("%", "%%")
    )
    return text.encode()
