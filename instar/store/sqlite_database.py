"""SQLite connections configured for the store, and the translation of SQLite's errors."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from instar.errors import ConflictError, StoreCorrupt, StoreError, StoreFull
from instar.store.schema import Table

BUSY_TIMEOUT_SECONDS = 30.0

MAX_INSERT_ROWS = 32

_UNIQUE_CODES = (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
# Quota and file-size limits, and a shared-memory file that cannot grow, are reported as I/O errors.
_DISK_FULL_CODES = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP)


class SqliteDatabase(sqlite3.Connection):
    """A connection to an SQLite file. A write transaction locks the file, so rows and names need no locks."""

    errors: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)
    for_update: ClassVar[str] = ""
    json_rows: ClassVar[str] = "json_group_array(json_array({}))"
    json_array_sql: ClassVar[str] = "SELECT value FROM json_each({})"
    path: Path
    busy_timeout = BUSY_TIMEOUT_SECONDS

    def wait_in_begin(self, busy_timeout: float = BUSY_TIMEOUT_SECONDS) -> None:
        """Make `begin` itself wait for the lock. SQLite sleeps for up to 100 ms at a time while it waits, so
        that a process that writes without pause would starve the others."""
        self.execute("PRAGMA busy_timeout = 0")
        self.busy_timeout = busy_timeout

    def insert(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert the rows in statements of 32, 16, 8, … rows, so that only a few statements are ever
        compiled."""
        start, size = 0, MAX_INSERT_ROWS
        while start < len(rows):
            while size > len(rows) - start:
                size //= 2
            self._insert_rows(table, rows[start : start + size])
            start += size

    def insert_autocommit(self, table: Table, rows: Sequence[Sequence[Any]]) -> bool:
        if len(rows) > MAX_INSERT_ROWS or self.in_transaction:
            return False
        self._insert_rows(table, rows)
        return True

    def _insert_rows(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        self.execute(table.insert_many_sql(len(rows)), tuple(chain.from_iterable(rows)))

    def lock_name(self, name: str) -> None:
        return

    def begin_read(self) -> None:
        self.execute("BEGIN")

    def is_connection_lost(self, error: Exception) -> bool:
        return False

    def begin(self) -> None:
        deadline = time.monotonic() + self.busy_timeout
        while True:
            try:
                self.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.0005, 0.003))

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")

    def is_rolled_back(self, error: Exception) -> bool:
        return not self.in_transaction  # SQLite undoes the transaction if the disk is full

    def is_global_failure(self, error: Exception) -> bool:
        return is_busy(error)

    def is_transient(self, error: Exception) -> bool:
        return False

    def translate(self, error: Exception) -> StoreError:
        return translate_error(error, self.path)


def connect(path: Path, *, read_only: bool = False) -> SqliteDatabase:
    """Return a connection to an existing file, in autocommit mode. One thread at a time may use it."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    has_log = path.with_name(f"{path.name}-wal").exists()
    if read_only and not has_log and not os.access(path.parent, os.W_OK):
        uri += "&immutable=1"  # SQLite cannot create the shared-memory file that it needs otherwise
    connection = sqlite3.connect(
        uri,
        uri=True,
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        factory=SqliteDatabase,
    )
    connection.path = path
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:  # any failure: close the connection, then re-raise
        connection.close()
        raise
    return connection


def primary_code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: Exception) -> bool:
    return primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def translate_error(error: Exception, path: Path) -> StoreError:
    """Translate an error of SQLite to the error that callers of the store see."""
    code, primary = getattr(error, "sqlite_errorcode", 0), primary_code(error)
    if code in _UNIQUE_CODES:
        return ConflictError(f"the row already exists: {error}")
    if primary == sqlite3.SQLITE_CONSTRAINT:
        return StoreError(f"the database rejected the row: {error}")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return corrupt_file_error(path, str(error))
    if primary == sqlite3.SQLITE_FULL or code in _DISK_FULL_CODES:
        return StoreFull(
            f"the disk of {path} is full ({error}): free some space, or raise the quota or file-size limit. "
            "Earlier writes are stored, and nothing of the failed write is stored"
        )
    if is_busy(error):
        return StoreError(f"{path} stayed locked by another process ({error}): find the process that hangs")
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return StoreError(f"cannot open {path} ({error}): check its permissions, and that it is a file")
    return StoreError(f"{path}: {error}")


def corrupt_file_error(path: Path, detail: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"{path} is damaged or not a store ({detail}): stop all processes that use it, keep a copy, then try "
        f"`sqlite3 {path.name} .recover`, restore a backup, or set store.path to another file"
    )
