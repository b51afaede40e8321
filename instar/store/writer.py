"""The one writer of a process: queued writes share a transaction, and so one wait for the disk.

Each write is a function of the connection, run under a savepoint of its own: one that fails is
undone alone and only its caller hears of it. A write may be run a second time, by itself, when the
shared transaction could not be committed, so it must depend on nothing but the database.

Every statement costs the writer its turn at the interpreter, which a busy event loop gives back late.
So writes of one kind, one behind another, are done with few statements (`BatchableWrite`), with a single one
where nothing has to be looked up first, and all callers of a commit are woken at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from instar.errors import StoreError
from instar.store.database import Database

T = TypeVar("T")
Work = Callable[[Database], T]

MAX_BATCH = 256
GATHER = 0.0005
"""Seconds to wait for company while writes come in groups: a commit costs much the same for one as for ten,
so under load this is time won. A write that comes alone does not wait, nor do as many as came the last
time."""


class BatchableWrite(ABC):
    """A write that returns nothing and can be done with others of its kind."""

    @abstractmethod
    def prepare(self) -> None:
        """What needs no database, done before the transaction begins."""

    @abstractmethod
    def __call__(self, db: Database) -> None: ...

    @abstractmethod
    def write_batch(self, db: Database, others: Sequence[Any]) -> None:
        """This one and then ``others`` of its kind. Raises when any would fail; each is then done by
        itself."""

    @abstractmethod
    def write_single(self, db: Database, others: Sequence[Any]) -> bool:
        """As `together`, in one statement, which is a transaction of its own. False, and nothing done, where
        it takes more. Raises when any would fail."""

    @abstractmethod
    def on_committed(self) -> None:
        """It is on disk."""


class _WriteJob:
    __slots__ = ("batchable", "error", "future", "result", "work")

    def __init__(self, work: Work[Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.batchable = work if isinstance(work, BatchableWrite) else None
        self.future = future
        self.result: Any = None
        self.error: Exception | None = None

    def resolve(self) -> None:
        """On the event loop of its caller."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Writer:
    """Owns its connection. `commits` and `writes` tell how well writes are grouped."""

    def __init__(self, db: Database, name: str, *, retry_timeout: float = 0.0) -> None:
        """``name`` is the store's, for errors. A transaction whose failure passes is tried again for
        ``patience`` seconds."""
        self.commits = 0
        self.writes = 0
        self.lease_check: Work[None] | None = None
        """Run first in every transaction; nothing is written where it raises StoreError."""
        self._db = db
        self._name = name
        self._retry_timeout = retry_timeout
        self._queue: SimpleQueue[_WriteJob | None] = SimpleQueue()
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
                raise StoreError(f"the store {self._name} is closed")
            self._queue.put(_WriteJob(work, future))
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
                self._commit([job for job in jobs if job.error is None])
            except Exception as error:  # noqa: BLE001 a writer that died would leave every caller waiting
                self._db.rollback()
                _fail(jobs, error)
            _wake(jobs)
            # While they wake up: whatever takes time here must not hold up who writes next.
            self._grouped = len(jobs)
            _done(jobs)
            jobs.clear()
        self._db.close()

    def _next_batch(self) -> tuple[list[_WriteJob], bool]:
        """Everything that is queued, waiting for the first and prepared while more may come; and whether to
        stop after it."""
        jobs: list[_WriteJob] = []
        job = self._queue.get()
        deadline = time.monotonic() + (GATHER if self._grouped > 1 else 0.0)
        while job is not None:
            jobs.append(job)
            _prepare(job)
            if len(jobs) == MAX_BATCH:
                return jobs, False
            try:
                job = self._take(deadline if len(jobs) < self._grouped else 0.0)
            except Empty:
                return jobs, False
        return jobs, True

    def _take(self, deadline: float) -> _WriteJob | None:
        """The next one that is queued. Raises Empty when there is none at the deadline."""
        try:
            return self._queue.get_nowait()
        except Empty:
            if (left := deadline - time.monotonic()) <= 0:
                raise
            return self._queue.get(timeout=left)

    def _commit(self, jobs: Sequence[_WriteJob]) -> None:
        if not jobs:
            return
        try:
            self._commit_with_retry(jobs)
        except self._db.errors as error:
            if len(jobs) == 1 or self._db.is_global_failure(error):
                _fail(jobs, self._db.translate(error))
            else:
                # One write that does not fit on the disk must not take the others with it.
                for job in jobs:
                    self._commit([job])
        except StoreError as error:
            self._db.rollback()
            _fail(jobs, error)

    def _commit_with_retry(self, jobs: Sequence[_WriteJob]) -> None:
        """One transaction, tried again while what hinders it may pass and each attempt was undone."""
        deadline: float | None = None
        while True:
            try:
                return self._transact(jobs)
            except self._db.errors as error:
                self._db.rollback()
                deadline = deadline or time.monotonic() + self._retry_timeout
                if not self._db.is_transient(error) or time.monotonic() > deadline:
                    raise
                if len(jobs) > 1 and not self._db.is_global_failure(error):
                    raise  # two groups in each other's way: one by one, they are not

    def _transact(self, jobs: Sequence[_WriteJob]) -> None:
        for job in jobs:
            job.result, job.error = None, None
        if not self._write_single(jobs):
            self._write_transaction(jobs)
        self.commits += 1
        self.writes += len(jobs)

    def _write_single(self, jobs: Sequence[_WriteJob]) -> bool:
        """Whether it took but one statement. Whatever fails is told in the long way."""
        first = jobs[0].batchable
        if first is None or self.lease_check is not None:
            return False
        others = [job.work for job in jobs[1:]]
        if any(type(other) is not type(first) for other in others):
            return False
        try:
            return first.write_single(self._db, others)
        except Exception:  # noqa: BLE001 whatever it is, the long way finds whose it is
            return False

    def _write_transaction(self, jobs: Sequence[_WriteJob]) -> None:
        """Each kind by itself, within a transaction."""
        self._db.begin()
        if self.lease_check is not None:
            self.lease_check(self._db)
        for alike in _alike(jobs):
            if not self._write_batch(alike):
                for job in alike:
                    self._attempt(job)
        self._db.commit()

    def _write_batch(self, jobs: Sequence[_WriteJob]) -> bool:
        """False when they are to be done one by one."""
        first = jobs[0].batchable
        if len(jobs) == 1 or first is None:
            return False
        others = [job.work for job in jobs[1:]]
        return self._under_savepoint(lambda db: first.write_batch(db, others)) is None

    def _attempt(self, job: _WriteJob) -> None:
        def work(db: Database) -> None:
            job.result = job.work(db)

        error = self._under_savepoint(work)
        job.error = self._db.translate(error) if isinstance(error, self._db.errors) else error

    def _under_savepoint(self, work: Work[None]) -> Exception | None:
        """What it raised, after undoing it."""
        self._db.execute("SAVEPOINT job")
        try:
            work(self._db)
        except Exception as error:  # whatever a write raises belongs to its caller
            if self._db.is_rolled_back(error):
                raise
            self._db.execute("ROLLBACK TO job")
            self._db.execute("RELEASE job")
            return error
        self._db.execute("RELEASE job")
        return None


def _prepare(job: _WriteJob) -> None:
    if job.batchable is not None:
        try:
            job.batchable.prepare()
        except Exception as error:  # noqa: BLE001 whatever a write raises belongs to its caller
            job.error = error


def _done(jobs: Sequence[_WriteJob]) -> None:
    for job in jobs:
        if job.error is None and job.batchable is not None:
            job.batchable.on_committed()


def _fail(jobs: Sequence[_WriteJob], error: Exception) -> None:
    for job in jobs:
        job.error = error


def _alike(jobs: Sequence[_WriteJob]) -> Iterator[list[_WriteJob]]:
    """Runs of writes of one kind, in the order they were queued."""
    for _, run in groupby(jobs, key=lambda job: type(job.work)):
        yield list(run)


def _wake(jobs: Sequence[_WriteJob]) -> None:
    for loop, theirs in groupby(jobs, key=lambda job: job.future.get_loop()):
        settled = list(theirs)
        try:
            loop.call_soon_threadsafe(_settle, settled)
        except RuntimeError:
            continue  # the loop is closed, and with it went everyone who waited


def _settle(jobs: Sequence[_WriteJob]) -> None:
    for job in jobs:
        job.resolve()
