"""A pool of threads that read concurrently with the writer, each with its own connection."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from instar.errors import StoreError
from instar.store.database import Database

T = TypeVar("T")


class ReaderPool:
    def __init__(
        self, connect: Callable[[], Database], name: str, *, threads: int, retry_timeout: float = 0.0
    ) -> None:
        """``name`` appears in errors. If a connection is lost, retry for ``retry_timeout`` seconds."""
        self._connect = connect
        self._name = name
        self._retry_timeout = retry_timeout
        self._local = threading.local()
        self._connections: list[Database] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="instar-store-reader")

    async def submit(self, read: Callable[[], T]) -> T:
        """Run a function in a thread of the pool, which has its own connection for `read`."""
        with self._lock:
            if self._is_closed:
                raise StoreError(f"the store {self._name} is closed")
            future = self._executor.submit(read)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._executor.shutdown()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def read_snapshot(self, fetch: Callable[[Database], T]) -> T:
        """Run a read whose statements all see the same snapshot. Call this only from a submitted function."""

        def fetch_in_transaction(db: Database) -> T:
            db.begin_read()
            try:
                return fetch(db)
            finally:
                db.rollback()

        return self.read(fetch_in_transaction)

    def read(self, fetch: Callable[[Database], T]) -> T:
        """Run a read, and retry it if the connection is lost. Call this only from a submitted function."""
        deadline: float | None = None
        while True:
            db = self._get_connection()
            try:
                return fetch(db)
            except db.errors as error:
                if not db.is_connection_lost(error):
                    raise db.translate(error) from error
                self._local.connection = None
                with self._lock:
                    self._connections.remove(db)
                db.close()
                deadline = deadline or time.monotonic() + self._retry_timeout
                if time.monotonic() > deadline:
                    raise db.translate(error) from error

    def _get_connection(self) -> Database:
        connection: Database | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._connect()
            self._local.connection = connection
            with self._lock:
                self._connections.append(connection)
        return connection
