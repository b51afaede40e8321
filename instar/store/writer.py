"""The one writer of a process: queued writes share a transaction, and so one wait for the disk.

Each write is a function of the connection, run under a savepoint of its own: one that fails is
undone alone and only its caller hears of it. A write may be run a second time, by itself, when the
shared transaction could not be committed, so it must depend on nothing but the database.

Every statement costs the writer its turn at the interpreter, which a busy event loop gives back late.
So writes of one kind, one behind another, are done with few statements (`Joint`), and all callers of
a commit are woken at once.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from instar.errors import StoreError
from instar.store.connection import BUSY_TIMEOUT, is_busy, translate

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MAX_BATCH = 256
GATHER = 0.0005
"""Seconds to wait for company while writes come in groups: a commit costs much the same for one as for ten,
so under load this is time won. A write that comes alone does not wait."""


class Joint(ABC):
    """A write that returns nothing and can be done with others of its kind."""

    @abstractmethod
    def prepare(self) -> None:
        """What needs no database, done before the transaction begins."""

    @abstractmethod
    def __call__(self, db: sqlite3.Connection) -> None: ...

    @abstractmethod
    def together(self, db: sqlite3.Connection, others: Sequence[Any]) -> None:
        """This one and then ``others`` of its kind. Raises when any would fail; each is then done by
        itself."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Work[Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        """On the event loop of its caller."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


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
        self._grouped = 0
        self._lock = threading.Lock()
        # A daemon: a process that ends without `close` has acknowledged nothing that is still queued.
        self._thread = threading.Thread(target=self._run, name="instar-store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Work[T]) -> asyncio.Future[T]:
        """Queue a write. The future, of the running event loop, resolves once it is on disk; cancelling
        it before its turn comes leaves it undone."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
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
            jobs = [job for job in jobs if not job.future.cancelled()]
            try:
                self._commit([job for job in jobs if self._is_ready(job)])
            except Exception as error:  # noqa: BLE001 a writer that died would leave every caller waiting
                for job in jobs:
                    job.error = error
            _wake(jobs)
            self._grouped = len(jobs)
        self._connection.close()

    def _next_batch(self) -> tuple[list[_Job], bool]:
        """Everything that is queued, waiting for the first; and whether to stop after it."""
        jobs: list[_Job] = []
        job = self._queue.get()
        if self._grouped > 1 and job is not None:
            time.sleep(GATHER)
        while job is not None:
            jobs.append(job)
            if len(jobs) == MAX_BATCH:
                return jobs, False
            try:
                job = self._queue.get_nowait()
            except Empty:
                return jobs, False
        return jobs, True

    def _is_ready(self, job: _Job) -> bool:
        if isinstance(job.work, Joint):
            try:
                job.work.prepare()
            except Exception as error:  # noqa: BLE001 whatever a write raises belongs to its caller
                job.error = error
                return False
        return True

    def _commit(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            return
        try:
            self._transact(jobs)
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if len(jobs) == 1 or is_busy(error):
                for job in jobs:
                    job.error = translate(error, self._path)
            else:
                # One write that does not fit on the disk must not take the others with it.
                for job in jobs:
                    job.result, job.error = None, None
                    self._commit([job])

    def _transact(self, jobs: Sequence[_Job]) -> None:
        self._begin()
        for alike in _alike(jobs):
            if not self._together(alike):
                for job in alike:
                    self._attempt(job)
        self._connection.execute("COMMIT")
        self.commits += 1
        self.writes += len(jobs)

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

    def _together(self, jobs: Sequence[_Job]) -> bool:
        """False when they are to be done one by one."""
        first = jobs[0].work
        if len(jobs) == 1 or not isinstance(first, Joint):
            return False
        others = [job.work for job in jobs[1:]]
        return self._under_savepoint(lambda db: first.together(db, others)) is None

    def _attempt(self, job: _Job) -> None:
        def work(db: sqlite3.Connection) -> None:
            job.result = job.work(db)

        error = self._under_savepoint(work)
        job.error = translate(error, self._path) if isinstance(error, sqlite3.Error) else error

    def _under_savepoint(self, work: Work[None]) -> Exception | None:
        """What it raised, after undoing it."""
        self._connection.execute("SAVEPOINT job")
        try:
            work(self._connection)
        except Exception as error:  # whatever a write raises belongs to its caller
            if not self._connection.in_transaction:
                raise  # a full disk made SQLite undo the whole transaction
            self._connection.execute("ROLLBACK TO job")
            self._connection.execute("RELEASE job")
            return error
        self._connection.execute("RELEASE job")
        return None


def _alike(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Runs of writes of one kind, in the order they were queued."""
    for _, run in groupby(jobs, key=lambda job: type(job.work)):
        yield list(run)


def _wake(jobs: Sequence[_Job]) -> None:
    for loop, theirs in groupby(jobs, key=lambda job: job.future.get_loop()):
        settled = list(theirs)
        try:
            loop.call_soon_threadsafe(_settle, settled)
        except RuntimeError:
            continue  # the loop is closed, and with it went everyone who waited


def _settle(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.settle()
