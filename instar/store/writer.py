"""The single writer of a process. Queued writes share a transaction, and therefore one wait for the disk.

Each write is a function that takes the connection. It runs in its own savepoint, so a write that fails is
rolled back individually, and only its caller gets the error. If the shared transaction cannot be committed,
each write may run again in a transaction of its own, so it must depend only on the database.

Every statement releases the GIL, and a busy event loop is slow to give it back. Therefore, consecutive writes
of calls are combined into a few statements (`AddCalls`), or into a single one if nothing has to be read
first, and all callers of a commit are notified together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from instar.errors import StoreError
from instar.store.calls import AddCalls
from instar.store.database import Database

T = TypeVar("T")
WriteFunction = Callable[[Database], T]

MAX_BATCH_WRITES = 256
MAX_RESOLVED_JOBS = 8
"""The number of writes whose callers continue in the same iteration of the event loop."""
GROUPING_WAIT_SECONDS = 0.0005
"""How long to wait for more writes if the previous batch had more than the current one. Committing ten writes
costs about as much as committing one, so waiting pays off under load."""


@dataclass(eq=False, slots=True)
class _WriteJob:
    work: WriteFunction[Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def prepare(self) -> None:
        if isinstance(self.work, AddCalls):
            try:
                self.work.prepare()
            except Exception as error:  # noqa: BLE001 any error is passed to the caller of the write
                self.error = error

    def resolve(self) -> None:
        """Set the future's result or exception. Must run on the caller's event loop."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Writer:
    """A thread that executes writes on its own connection."""

    def __init__(self, db: Database, name: str, *, retry_timeout: float = 0.0) -> None:
        """``name`` appears in errors. Transient failures are retried for ``retry_timeout`` seconds."""
        self.commit_count = 0
        self.lease_check: WriteFunction[None] | None = None
        """A check that runs first in every transaction. If it raises StoreError, nothing is written."""
        self._db = db
        self._name = name
        self._retry_timeout = retry_timeout
        self._queue: SimpleQueue[_WriteJob | None] = SimpleQueue()
        self._is_closed = False
        self._previous_batch_size = 0
        self._lock = threading.Lock()
        # A daemon thread does not delay exit. Writes that are queued then have not been acknowledged.
        self._thread = threading.Thread(target=self._run, name="instar-store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: WriteFunction[T]) -> asyncio.Future[T]:
        """Queue a write and return a future that resolves once the write is on disk. Cancelling the future
        before the write starts prevents the write."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_closed:
                raise StoreError(f"the store {self._name} is closed")
            self._queue.put(_WriteJob(work, future))
        return future

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            jobs, is_closing = self._get_next_batch()
            jobs = [job for job in jobs if not job.future.cancelled()]
            try:
                self._commit([job for job in jobs if job.error is None])
            except Exception as error:  # noqa: BLE001 any error: if the writer thread died, all callers would hang
                self._db.rollback()
                _set_error(jobs, error)
            self._db.on_batch_finished()
            _notify_callers(jobs)
            # The callers have already been notified, so this does not delay them.
            self._previous_batch_size = len(jobs)
            for job in jobs:
                if job.error is None and isinstance(job.work, AddCalls):
                    job.work.on_committed()
            jobs.clear()
        self._db.close()

    def _get_next_batch(self) -> tuple[list[_WriteJob], bool]:
        """Return the next batch of up to MAX_BATCH_WRITES queued writes, and whether the writer must stop.

        Wait for the first write and, under load, up to GROUPING_WAIT_SECONDS for more. Each write is prepared
        as soon as it is dequeued, while more writes may arrive.
        """
        jobs: list[_WriteJob] = []
        job = self._queue.get()
        deadline = time.monotonic() + (GROUPING_WAIT_SECONDS if self._previous_batch_size > 1 else 0.0)
        while job is not None:
            jobs.append(job)
            job.prepare()
            if len(jobs) == MAX_BATCH_WRITES:
                return jobs, False
            wait = deadline - time.monotonic() if len(jobs) < self._previous_batch_size else 0.0
            try:
                job = self._queue.get(timeout=max(0.0, wait))
            except Empty:
                return jobs, False
        return jobs, True

    def _commit(self, jobs: Sequence[_WriteJob]) -> None:
        if not jobs:
            return
        try:
            self._commit_with_retry(jobs)
        except self._db.errors as error:
            if len(jobs) == 1 or self._db.is_global_failure(error):
                _set_error(jobs, self._db.translate(error))
            else:
                # A write that does not fit on the disk must not fail the others.
                for job in jobs:
                    self._commit([job])
        except StoreError as error:
            self._db.rollback()
            _set_error(jobs, error)

    def _commit_with_retry(self, jobs: Sequence[_WriteJob]) -> None:
        deadline: float | None = None
        while True:  # no sleep: if the connection is lost, `begin` waits for the server
            for job in jobs:
                job.result, job.error = None, None
            try:
                if not self._write_in_one_statement(jobs):
                    self._write_transaction(jobs)
                self.commit_count += 1
                return
            except self._db.errors as error:
                self._db.rollback()
                deadline = deadline or time.monotonic() + self._retry_timeout
                if not self._db.is_transient(error) or time.monotonic() > deadline:
                    raise
                if len(jobs) > 1 and not self._db.is_global_failure(error):
                    raise  # two batches may deadlock; `_commit` repeats the writes one by one

    def _write_in_one_statement(self, jobs: Sequence[_WriteJob]) -> bool:
        """Try to write the jobs in one statement, and return True on success. Errors are not raised here,
        because `_write_transaction` reports them."""
        writes = _get_call_writes(jobs)
        if len(writes) < len(jobs) or self.lease_check is not None:
            return False
        try:
            return AddCalls.write_in_one_statement(self._db, writes)
        except Exception:  # noqa: BLE001 any error: the transaction shows which write caused it
            return False

    def _write_transaction(self, jobs: Sequence[_WriteJob]) -> None:
        self._db.begin()
        if self.lease_check is not None:
            self.lease_check(self._db)
        for _, group in groupby(jobs, key=lambda job: type(job.work)):
            batch = list(group)
            if not self._write_batch(batch):
                for job in batch:
                    self._write_job(job)
        self._db.commit()

    def _write_batch(self, jobs: Sequence[_WriteJob]) -> bool:
        """Return True if the jobs were written together, or False if they must be written one by one."""
        writes = _get_call_writes(jobs)
        return len(writes) > 1 and self._run_in_savepoint(lambda db: AddCalls.write_batch(db, writes)) is None

    def _write_job(self, job: _WriteJob) -> None:
        def work(db: Database) -> None:
            job.result = job.work(db)

        error = self._run_in_savepoint(work)
        job.error = self._db.translate(error) if isinstance(error, self._db.errors) else error

    def _run_in_savepoint(self, work: WriteFunction[None]) -> Exception | None:
        """Run the function. If it fails, undo it and return the error. Raise it if the transaction ended."""
        self._db.execute("SAVEPOINT job")
        try:
            work(self._db)
        except Exception as error:  # any error is passed to the caller of the write
            if self._db.is_rolled_back(error):
                raise
            self._db.rollback_savepoint()
            self._db.execute("RELEASE job")
            return error
        self._db.execute("RELEASE job")
        return None


def _get_call_writes(jobs: Sequence[_WriteJob]) -> list[AddCalls]:
    return [job.work for job in jobs if isinstance(job.work, AddCalls)]


def _set_error(jobs: Sequence[_WriteJob], error: Exception) -> None:
    for job in jobs:
        job.error = error


def _notify_callers(jobs: Sequence[_WriteJob]) -> None:
    for loop, group in groupby(jobs, key=lambda job: job.future.get_loop()):
        finished = list(group)
        try:
            loop.call_soon_threadsafe(_resolve_jobs, loop, finished)
        except RuntimeError:
            continue  # the loop is closed, so nothing is waiting for these writes


def _resolve_jobs(loop: asyncio.AbstractEventLoop, jobs: Sequence[_WriteJob]) -> None:
    """Resolve the jobs in small portions, so that a large batch does not block the event loop at once."""
    for job in jobs[:MAX_RESOLVED_JOBS]:
        job.resolve()
    if len(jobs) > MAX_RESOLVED_JOBS:
        loop.call_soon(_resolve_jobs, loop, jobs[MAX_RESOLVED_JOBS:])
