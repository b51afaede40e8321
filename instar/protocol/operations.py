"""Schedules operations in memory. Each operation runs once, in sequence per queue, and its result is kept for
some time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from instar.protocol.base import OperationResult, OperationScheduler, ProtocolError, ServiceLimits
from instar.protocol.errors import to_protocol_error
from instar.types import new_id

SWEEP_EVERY = 5.0
"""Seconds between two searches for expired results."""
KEPT_AFTER_DELIVERY = 300.0
"""Seconds that a result is kept after its delivery, for a client that lost the response."""


@dataclass(eq=False, slots=True)
class _Operation:
    operation_id: str
    kind: str
    owner: str
    work: Callable[[], Awaitable[Any]] | None
    """None once the operation is done, to free what the work refers to."""
    result: asyncio.Future[OperationResult]
    queue: _SequenceQueue | None
    seq: int | None
    key: str | None
    kept_until: float = float("inf")


@dataclass(eq=False, slots=True)
class _SequenceQueue:
    name: str
    next: int = 1
    """The sequence id that runs next."""
    running: bool = False
    operations: dict[int, _Operation] = field(default_factory=dict[int, _Operation])
    """The operations by sequence id: those that wait or run, and finished ones whose result is still kept."""
    gap_timer: asyncio.TimerHandle | None = None

    def cancel_gap_timer(self) -> None:
        if self.gap_timer is not None:
            self.gap_timer.cancel()
            self.gap_timer = None


class LocalOperationScheduler(OperationScheduler):
    """Runs operations in this process. After a failed operation, the next one in its queue runs: clients
    decide what a failure means.

    If a sequence id does not arrive in time, the operations that wait for it fail and stay failed; the queue
    continues when it arrives.
    """

    def __init__(self, limits: ServiceLimits | None = None) -> None:
        self._limits = limits or ServiceLimits()
        self._operations: dict[str, _Operation] = {}
        self._keys: dict[tuple[str, str], _Operation] = {}
        self._queues: dict[str, _SequenceQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = 0
        self._swept_at = time.monotonic()
        self._closed = False

    def submit(
        self,
        kind: str,
        owner: str,
        work: Callable[[], Awaitable[Any]],
        *,
        queue: str | None = None,
        seq: int | None = None,
        key: str | None = None,
    ) -> str:
        self._sweep()
        repeated = self._find_repeated(kind, owner, queue, seq, key)
        if repeated is not None:
            return repeated.operation_id
        if self._closed:
            raise ProtocolError("the server is closing", 503, "server")
        if self._open >= self._limits.max_operations:
            raise ProtocolError(f"{self._open} operations wait or run already: try again later", 429)
        sequence = None
        if queue is not None and seq is not None:
            sequence = self._queues.setdefault(queue, _SequenceQueue(queue))
        future = asyncio.get_running_loop().create_future()
        operation = _Operation(new_id("op"), kind, owner, work, future, sequence, seq, key)
        self._operations[operation.operation_id] = operation
        if key is not None:
            self._keys[owner, key] = operation
        self._open += 1
        if sequence is None or seq is None:
            self._start(operation)
        else:
            sequence.operations[seq] = operation
            self._advance(sequence)
        return operation.operation_id

    async def wait(self, operation_id: str, owner: str, timeout: float) -> OperationResult | None:
        self._sweep()
        operation = self._operations.get(operation_id)
        if operation is None or operation.owner != owner:
            raise ProtocolError(f"there is no operation {operation_id}, or its result has expired", 404)
        if not operation.result.done():
            await asyncio.wait([operation.result], timeout=timeout)
        if not operation.result.done():
            return None
        operation.kept_until = min(operation.kept_until, time.monotonic() + KEPT_AFTER_DELIVERY)
        return operation.result.result()

    def close_queue(self, queue: str) -> None:
        closed = self._queues.pop(queue, None)
        if closed is not None:
            closed.cancel_gap_timer()
            self._fail_waiting(closed, ProtocolError(f"{queue} was ended before this operation ran", 404))

    async def close(self) -> None:
        self._closed = True
        for queue in self._queues.values():
            queue.cancel_gap_timer()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        error = ProtocolError("the server is closing", 503, "server")
        for operation in self._operations.values():
            self._finish(operation, OperationResult(error=error))

    def _find_repeated(
        self, kind: str, owner: str, queue: str | None, seq: int | None, key: str | None
    ) -> _Operation | None:
        """Return the operation that this submission repeats, or None."""
        operation = self._keys.get((owner, key)) if key is not None else None
        if operation is None and queue is not None and seq is not None:
            operation = self._find_in_queue(queue, seq)
        if operation is not None and (operation.kind != kind or operation.owner != owner):
            what = "this idempotency key" if operation.key == key else f"sequence id {seq} of {queue}"
            raise ProtocolError(f"{what} belongs to another operation ({operation.kind})", 409)
        return operation

    def _find_in_queue(self, queue: str, seq: int) -> _Operation | None:
        if seq < 1:
            raise ProtocolError(f"sequence ids begin with 1; received {seq}")
        sequence = self._queues.get(queue)
        if sequence is None:
            return None
        operation = sequence.operations.get(seq)
        if operation is None and seq < sequence.next:
            raise ProtocolError(f"sequence id {seq} of {queue} was run already; its result has expired", 409)
        return operation

    # --- running ---

    def _advance(self, queue: _SequenceQueue) -> None:
        """Start the next operation of a queue. If its sequence id has not arrived, start the timer."""
        if queue.running or self._closed:
            return
        while (operation := queue.operations.get(queue.next)) is not None and operation.result.done():
            if operation.operation_id not in self._operations:
                del queue.operations[queue.next]
            queue.next += 1
        if operation is not None:
            queue.cancel_gap_timer()
            queue.running = True
            self._start(operation)
        elif queue.gap_timer is None and any(not o.result.done() for o in queue.operations.values()):
            loop = asyncio.get_running_loop()
            queue.gap_timer = loop.call_later(self._limits.sequence_gap_timeout, self._on_gap_timeout, queue)

    def _on_gap_timeout(self, queue: _SequenceQueue) -> None:
        queue.gap_timer = None
        self._fail_waiting(
            queue,
            ProtocolError(
                f"not run: sequence id {queue.next} of {queue.name}, which must run first, did not arrive "
                f"within {self._limits.sequence_gap_timeout:g} s"
            ),
        )

    def _fail_waiting(self, queue: _SequenceQueue, error: ProtocolError) -> None:
        for seq, operation in queue.operations.items():
            if not (queue.running and seq == queue.next):
                self._finish(operation, OperationResult(error=error))

    def _start(self, operation: _Operation) -> None:
        task = asyncio.create_task(self._run(operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, operation: _Operation) -> None:
        assert operation.work is not None
        try:
            result = OperationResult(await operation.work())
        except Exception as error:  # noqa: BLE001 - every error is the result that the client receives
            result = OperationResult(error=to_protocol_error(error))
        self._finish(operation, result)
        if operation.queue is not None:
            operation.queue.running = False
            self._advance(operation.queue)

    def _finish(self, operation: _Operation, result: OperationResult) -> None:
        if operation.result.done():
            return
        operation.work = None
        operation.result.set_result(result)
        operation.kept_until = time.monotonic() + self._limits.result_ttl
        self._open -= 1

    def _sweep(self) -> None:
        now = time.monotonic()
        if now < self._swept_at + min(SWEEP_EVERY, self._limits.result_ttl):
            return
        self._swept_at = now
        for operation in [o for o in self._operations.values() if o.kept_until < now]:
            del self._operations[operation.operation_id]
            if operation.key is not None:
                self._keys.pop((operation.owner, operation.key), None)
            queue, seq = operation.queue, operation.seq
            # An operation that failed because of a gap is kept until the queue has passed its sequence id.
            if queue is not None and seq is not None and seq < queue.next:
                queue.operations.pop(seq, None)
