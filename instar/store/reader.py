"""Reads run beside the writer: a few threads, each with a connection of its own.

A read sees one snapshot and ends with its last row; what is costly to make into objects is made
afterwards, so that no snapshot is held for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from instar.errors import StoreError
from instar.store.database import Database

T = TypeVar("T")


class ReaderPool:
    def __init__(
        self, connect: Callable[[], Database], name: str, *, threads: int, retry_timeout: float = 0.0
    ) -> None:
        """``name`` is the store's, for errors. A read whose connection is lost is done again on a new
        one, for ``patience`` seconds."""
        self._connect = connect
        self._name = name
        self._retry_timeout = retry_timeout
        self._local = threading.local()
        self._connections: list[Database] = []
        self._lock = threading.Lock()
        self._closed = False
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="instar-store-reader")

    def submit(self, read: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._closed:
                raise StoreError(f"the store {self._name} is closed")
            return self._executor.submit(read)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._executor.shutdown()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def look_up(self, fetch: Callable[[Database], T]) -> T:
        """A read of one statement, which is a snapshot by itself. In a thread of `submit`."""
        return self._fetch(fetch)

    def snapshot(self, fetch: Callable[[Database], T]) -> T:
        """A read of any number of statements. In a thread of `submit`."""

        def read(db: Database) -> T:
            db.begin_read()
            try:
                return fetch(db)
            finally:
                db.rollback()

        return self._fetch(read)

    def _fetch(self, fetch: Callable[[Database], T]) -> T:
        deadline: float | None = None
        while True:
            db = self._connection()
            try:
                return fetch(db)
            except db.errors as error:
                if not db.is_connection_lost(error):
                    raise db.translate(error) from error
                self._forget(db)
                deadline = deadline or time.monotonic() + self._retry_timeout
                if time.monotonic() > deadline:
                    raise db.translate(error) from error

    def _connection(self) -> Database:
        connection: Database | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._connect()
            self._local.connection = connection
            with self._lock:
                self._connections.append(connection)
        return connection

    def _forget(self, connection: Database) -> None:
        self._local.connection = None
        with self._lock:
            self._connections.remove(connection)
        connection.close()
