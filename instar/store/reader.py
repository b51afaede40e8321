"""Reads run beside the writer: a few threads, each with a connection of its own.

A read sees one snapshot and ends with its last row; what is costly to make into objects is made
afterwards, so that no snapshot is held for long.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from instar.errors import StoreError
from instar.store.connection import connect, translate

T = TypeVar("T")
THREADS = 4


class Readers:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="instar-store-reader")

    def submit(self, read: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._closed:
                raise StoreError(f"the store {self._path} is closed")
            return self._executor.submit(read)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._executor.shutdown()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def look_up(self, fetch: Callable[[sqlite3.Connection], T]) -> T:
        """A read of one statement, which is a snapshot by itself. In a thread of `submit`."""
        try:
            return fetch(self._connection())
        except sqlite3.Error as error:
            raise translate(error, self._path) from error

    def snapshot(self, fetch: Callable[[sqlite3.Connection], T]) -> T:
        """A read of any number of statements. In a thread of `submit`."""
        try:
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                return fetch(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise translate(error, self._path) from error

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = connect(self._path, read_only=True)
            self._local.connection = connection
            with self._lock:
                self._connections.append(connection)
        return connection
