"""The one writer of a process: queued writes share a transaction, and so one wait for the disk.

Each write is a function of the connection, run under a savepoint of its own: one that fails is
undone alone and only its caller hears of it. A write may be run a second time, by itself, when the
shared transaction could not be committed, so it must depend on nothing but the database.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from instar.errors import StoreError
from instar.store.connection import BUSY_TIMEOUT, is_busy, translate

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MAX_BATCH = 256


@dataclass(frozen=True, slots=True)
class _Job:
    work: Work[Any]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class _Outcome:
    result: Any = None
    error: Exception | None = None


class Writer:
    """Owns its connection. `commits` and `writes` tell how well writes are grouped."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, busy_timeout: float = BUSY_TIMEOUT
    ) -> None:
        # Waiting is done in `_begin`: SQLite's own wait sleeps up to 100 ms a time, and a process that
        # writes without pause would then starve the others.
        connection.execute("PRAGMA busy_timeout = 0")
        self.commits = 0
        self.writes = 0
        self._connection = connection
        self._path = path
        self._busy_timeout = busy_timeout
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        # A daemon: a process that ends without `close` has acknowledged nothing that is still queued.
        self._thread = threading.Thread(target=self._run, name="instar-store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Work[T]) -> Future[T]:
        """Queue a write. The future resolves once it is on disk; cancelling it before its turn comes
        leaves it undone."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StoreError(f"the store {self._path} is closed")
            self._queue.put(_Job(work, future))
        return future

    def close(self) -> None:
        """Write what is queued, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            jobs, closing = self._next_batch()
            jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            try:
                self._commit(jobs)
            except Exception as error:  # noqa: BLE001 a writer that died would leave every caller waiting
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)
        self._connection.close()

    def _next_batch(self) -> tuple[list[_Job], bool]:
        """Everything that is queued, waiting for the first; and whether to stop after it."""
        jobs: list[_Job] = []
        job = self._queue.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) == MAX_BATCH:
                return jobs, False
            try:
                job = self._queue.get_nowait()
            except Empty:
                return jobs, False
        return jobs, True

    def _commit(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            return
        try:
            outcomes = self._transact(jobs)
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if len(jobs) == 1 or is_busy(error):
                for job in jobs:
                    job.future.set_exception(translate(error, self._path))
            else:
                # One write that does not fit on the disk must not take the others with it.
                for job in jobs:
                    self._commit([job])
            return
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome.error is None:
                job.future.set_result(outcome.result)
            else:
                job.future.set_exception(outcome.error)

    def _transact(self, jobs: Sequence[_Job]) -> list[_Outcome]:
        self._begin()
        outcomes = [self._attempt(job) for job in jobs]
        self._connection.execute("COMMIT")
        self.commits += 1
        self.writes += len(jobs)
        return outcomes

    def _begin(self) -> None:
        deadline = time.monotonic() + self._busy_timeout
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.0005, 0.003))

    def _attempt(self, job: _Job) -> _Outcome:
        self._connection.execute("SAVEPOINT job")
        try:
            result = job.work(self._connection)
        except Exception as error:  # whatever a write raises belongs to its caller
            if not self._connection.in_transaction:
                raise  # a full disk made SQLite undo the whole transaction
            self._connection.execute("ROLLBACK TO job")
            self._connection.execute("RELEASE job")
            return _Outcome(error=translate(error, self._path) if isinstance(error, sqlite3.Error) else error)
        self._connection.execute("RELEASE job")
        return _Outcome(result)
