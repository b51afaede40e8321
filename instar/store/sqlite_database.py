"""SQLite connections that implement `Database`, the counter of acknowledged calls, and error translation."""

from __future__ import annotations

import logging
import mmap
import os
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from instar.errors import ConflictError, StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from instar.store.schema import CALLS
from instar.store.table import Table

logger = logging.getLogger(__name__)
T = TypeVar("T")

BUSY_TIMEOUT_SECONDS = 30.0
READER_CACHE_KIB = 512
"""The page cache of each reader. A store has several, and the operating system caches the pages as well."""

MAX_INSERT_ROWS = 32
COUNTER_BYTES = 8

_UNIQUE_CODES = (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
# Quota and file-size limits, and a shared-memory file that cannot grow, are reported as I/O errors.
_DISK_FULL_CODES = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP)


def get_counter_path(path: Path) -> Path:
    return path.with_name(path.name + "-acknowledged")


class CallCounter:
    """A file next to the store with the row number of the last committed call, written by all processes.

    SQLite silently drops commits that it cannot read from a truncated or damaged write-ahead log, so the row
    number is compared with the database at the next start. It is written after the commit, before callers
    are notified. The file is mapped into memory, because a system call would release the GIL.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = os.open(get_counter_path(path), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(file).st_size != COUNTER_BYTES:
                # On a full disk, this raises an error, but a write to mapped memory would kill the process.
                os.pwrite(file, bytes(COUNTER_BYTES), 0)
                os.truncate(file, COUNTER_BYTES)
            self._memory = mmap.mmap(file, COUNTER_BYTES)
        finally:
            os.close(file)
        self._acknowledged_row_number = self._read()

    def report_lost_calls(self, last_row_number: int) -> None:
        """Log a warning if the database has lost acknowledged calls, and lower the counter, so that they are
        reported once. ``last_row_number`` is the row number of the last call in the database. It must be read
        after this object was created, because other processes may be writing."""
        if self._acknowledged_row_number > last_row_number:
            logger.warning(
                "%s acknowledged call(s) are missing from %s (row numbers %s to %s), and other writes from "
                "that time may be missing too: the write-ahead log was truncated or damaged, or an older "
                "copy of the file was restored. To recover them, restore the store's files from a backup",
                self._acknowledged_row_number - last_row_number,
                self._path,
                last_row_number + 1,
                self._acknowledged_row_number,
            )
            self._write(last_row_number)

    def record(self, last_row_number: int) -> None:
        if last_row_number > self._read():
            self._write(last_row_number)

    def _read(self) -> int:
        return int.from_bytes(self._memory[:], "little")

    def _write(self, last_row_number: int) -> None:
        self._memory[:] = last_row_number.to_bytes(COUNTER_BYTES, "little")

    def close(self) -> None:
        self._memory.close()


class SqliteDatabase(sqlite3.Connection):
    """A connection to a SQLite file. A write transaction locks the file, so rows and names need no locks."""

    errors: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)
    for_update: ClassVar[str] = ""
    for_delete: ClassVar[str] = ""
    json_rows_sql: ClassVar[str] = "json_group_array(json_array({}))"
    json_array_sql: ClassVar[str] = "SELECT value FROM json_each({})"
    path: Path
    busy_timeout = BUSY_TIMEOUT_SECONDS
    _counter: CallCounter | None = None
    _last_call_row: int | None = None
    """The row number of the last call inserted since the last commit or rollback, or None."""

    def wait_in_begin(self, busy_timeout: float = BUSY_TIMEOUT_SECONDS) -> None:
        """Wait for the lock in `begin` instead of in SQLite. SQLite sleeps for up to 100 ms at a time, so it
        would rarely get the lock while another process writes continuously."""
        self.execute("PRAGMA busy_timeout = 0")
        self.busy_timeout = busy_timeout

    def start_call_counter(self) -> None:
        """Log a warning if acknowledged calls are missing, and start recording acknowledged calls."""
        try:
            counter = CallCounter(self.path)
            counter.report_lost_calls(self._read_last_row_number())
            self._counter = counter
        except OSError as error:  # the store works without the counter
            logger.warning("cannot count the acknowledged calls of %s: %s", self.path, error)

    def _read_last_row_number(self) -> int:
        """Return the row number of the last call, including calls that were deleted on purpose."""
        last = self.execute("SELECT MAX(seq) FROM calls").fetchone()[0] or 0
        last_forgotten = self.execute("SELECT MAX(last_call) FROM forgotten_sessions").fetchone()[0] or 0
        return max(last, last_forgotten)

    def on_batch_finished(self) -> None:
        if self._last_call_row is not None and self._counter is not None:
            self._counter.record(self._last_call_row)
        self._last_call_row = None

    def close(self) -> None:
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        super().close()

    def insert(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert 32, 16, 8, … rows per statement, so that few different statements are compiled."""
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
        cursor = self.execute(table.build_insert_sql(len(rows)), tuple(chain.from_iterable(rows)))
        if table is CALLS:
            self._last_call_row = cursor.lastrowid

    def lock_name(self, name: str) -> None:
        return

    def begin_read(self) -> None:
        self.execute("BEGIN")

    def is_connection_lost(self, error: Exception) -> bool:
        return False

    def begin(self) -> None:
        retry_while_busy(lambda: self.execute("BEGIN IMMEDIATE"), self.busy_timeout)

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback_savepoint(self) -> None:
        self._last_call_row = None
        self.execute("ROLLBACK TO job")

    def rollback(self) -> None:
        self._last_call_row = None
        if self.in_transaction:
            self.execute("ROLLBACK")

    def is_rolled_back(self, error: Exception) -> bool:
        return not self.in_transaction  # SQLite rolls back the transaction if the disk is full

    def is_global_failure(self, error: Exception) -> bool:
        return is_busy(error)

    def is_transient(self, error: Exception) -> bool:
        return False

    def translate(self, error: Exception) -> StoreError:
        return translate_error(error, self.path)


def connect(path: Path, *, read_only: bool = False) -> SqliteDatabase:
    """Connect to an existing file in autocommit mode. One thread at a time may use the connection."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    has_wal = path.with_name(f"{path.name}-wal").exists()
    if read_only and not has_wal and not os.access(path.parent, os.W_OK):
        uri += "&immutable=1"  # otherwise, SQLite would have to create a shared-memory file
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
        if read_only:
            connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
        else:
            connection.execute("PRAGMA secure_delete = ON")  # overwrite what is deleted or replaced
    except BaseException:  # any failure: close the connection, then re-raise
        connection.close()
        raise
    return connection


def erase_deleted(path: Path, *, rewrite: bool, timeout: float = BUSY_TIMEOUT_SECONDS) -> bool:
    """Move the write-ahead log into the database file and empty it, because it still contains what was
    deleted. Return False if another process used it for longer than ``timeout`` seconds.

    With ``secure_delete``, SQLite overwrites deleted rows, but not the copies of rows that it leaves in the
    unused part of a page when it splits the page. ``rewrite`` removes these as well: it rewrites the complete
    file, while other processes wait with their writes.
    """
    connection = connect(path)
    try:
        connection.execute(f"PRAGMA busy_timeout = {round(timeout * 1000)}")
        if rewrite:
            retry_while_busy(lambda: connection.execute("VACUUM"), timeout)
        return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    finally:
        connection.close()


def get_primary_code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: Exception) -> bool:
    return get_primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def retry_while_busy(statement: Callable[[], T], timeout: float = BUSY_TIMEOUT_SECONDS) -> T:
    """Execute the statement, and wait up to ``timeout`` seconds while another process has the lock."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return statement()
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.0005, 0.003))


def translate_error(error: Exception, path: Path) -> StoreError:
    code, primary = getattr(error, "sqlite_errorcode", 0), get_primary_code(error)
    if code in _UNIQUE_CODES:
        return ConflictError(f"the row already exists: {error}")
    if primary == sqlite3.SQLITE_CONSTRAINT:
        return StoreError(f"the database rejected the row: {error}")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return corrupt_file_error(path, str(error))
    if primary == sqlite3.SQLITE_FULL or code in _DISK_FULL_CODES:
        return StoreFull(
            f"the disk of {path} is full ({error}): free some space, or raise the quota or file-size limit. "
            "Earlier writes are stored; the failed write was rolled back"
        )
    if is_busy(error):
        return StoreUnavailable(f"{path} stayed locked by another process ({error}): stop that process")
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return StoreError(f"cannot open {path} ({error}): check its permissions, and that it is a file")
    return StoreError(f"{path}: {error}")


def corrupt_file_error(path: Path, detail: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"{path} is damaged or not a store ({detail}): stop all processes that use it, keep a copy, then try "
        f"`sqlite3 {path.name} .recover`, restore a backup, or set store.path to a different file"
    )
