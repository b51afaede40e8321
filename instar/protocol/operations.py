"""Schedules the operations that clients submit and keeps their results in memory until they expire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from instar.protocol.base import ProtocolError, ServiceLimits, to_protocol_error
from instar.types import new_id

SWEEP_INTERVAL_SECONDS = 5.0
DELIVERED_RESULT_TTL_SECONDS = 300.0
"""A delivered result is kept for this long, in case the client did not receive the response."""

OperationFunction = Callable[[], Awaitable[Any]]
REJECTED = "rejected request"
"""The kind of an operation that only consumes the sequence id of a rejected request."""
_SEQUENCE_HINT = "use sequence ids above the highest one sent so far"


@dataclass(frozen=True, slots=True)
class OperationResult:
    value: Any = None
    error: ProtocolError | None = None


@dataclass(eq=False, slots=True)
class _Operation:
    operation_id: str
    kind: str
    owner: str
    function: OperationFunction | None
    """Set to None when the operation is done, to free the objects that the function references."""
    result: asyncio.Future[OperationResult]
    queue: _SequenceQueue | None
    seq: int | None
    offset: int
    """The difference between ``seq`` and the client's own sequence id."""
    key: str | None
    expires_at: float = float("inf")


@dataclass(eq=False, slots=True)
class _SequenceQueue:
    name: str
    next_seq: int = 1
    offset: int = 0
    """The offset of the operation that was started last, for error messages."""
    is_running: bool = False
    operations: dict[int, _Operation] = field(default_factory=dict[int, _Operation])
    """The operations by sequence id, including finished operations whose result is kept."""
    gap_timer: asyncio.TimerHandle | None = None

    def cancel_gap_timer(self) -> None:
        if self.gap_timer is not None:
            self.gap_timer.cancel()
            self.gap_timer = None


class OperationScheduler:
    """Runs operations in this process. Clients retrieve the results later.

    Each model has a queue, whose operations run in the order of their sequence ids, starting with 1. If a
    sequence id does not arrive in time, the operations waiting for it fail, and the queue continues after
    the highest sequence id received. Operations without a sequence id run immediately. A failed operation
    does not stop its queue, because clients decide what a failure means.
    """

    def __init__(self, limits: ServiceLimits | None = None) -> None:
        self._limits = limits or ServiceLimits()
        self._operations: dict[str, _Operation] = {}
        self._operations_by_key: dict[tuple[str, str], _Operation] = {}
        self._queues: dict[str, _SequenceQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending_count = 0
        self._swept_at = time.monotonic()
        self._is_closed = False

    def submit(
        self,
        kind: str,
        owner: str,
        function: OperationFunction,
        *,
        queue_name: str | None = None,
        seq: int | None = None,
        offset: int = 0,
        key: str | None = None,
    ) -> str:
        """Submit an operation and return its id. If an earlier operation has the same ``key`` and owner, or
        the same queue and sequence id, return the id of that operation. Error messages show ``seq - offset``,
        which is the client's own sequence id.

        Raises ProtocolError: 400 if ``seq`` is out of range, 409 if the earlier operation was of a different
        kind or its result has expired, 429 if there are too many operations, 503 during shutdown."""
        self._sweep()
        duplicate = self._find_duplicate(kind, owner, queue_name, seq, offset, key)
        if duplicate is not None:
            return duplicate.operation_id
        if self._is_closed:
            raise ProtocolError("the server is shutting down", 503, "server")
        if self._pending_count >= self._limits.max_operations:
            raise ProtocolError(
                f"too many operations are waiting or running (limit: {self._limits.max_operations}); "
                "try again later",
                429,
            )
        sequence_queue = None
        if queue_name is not None and seq is not None:
            sequence_queue = self._queues.setdefault(queue_name, _SequenceQueue(queue_name))
        future = asyncio.get_running_loop().create_future()
        operation = _Operation(new_id("op"), kind, owner, function, future, sequence_queue, seq, offset, key)
        self._operations[operation.operation_id] = operation
        if key is not None:
            self._operations_by_key[owner, key] = operation
        self._pending_count += 1
        if sequence_queue is None or seq is None:
            self._start(operation)
        else:
            sequence_queue.operations[seq] = operation
            self._advance(sequence_queue)
        return operation.operation_id

    def reject(self, owner: str, queue_name: str, seq: int, error: ProtocolError, *, offset: int = 0) -> str:
        """Consume the sequence id of a request that was rejected with ``error``, so that later operations do
        not wait for it. Raises the same errors as `submit`."""

        async def fail() -> None:
            raise error

        return self.submit(REJECTED, owner, fail, queue_name=queue_name, seq=seq, offset=offset)

    async def wait(self, operation_id: str, owner: str, timeout: float) -> OperationResult | None:
        """Return the result of an operation, or None if it is not done after ``timeout`` seconds. Raises
        ProtocolError 404 if the operation is unknown or its result has expired."""
        self._sweep()
        operation = self._operations.get(operation_id)
        if operation is None or operation.owner != owner:
            raise ProtocolError(f"operation {operation_id} does not exist or its result has expired", 404)
        if not operation.result.done():
            await asyncio.wait([operation.result], timeout=timeout)
        if not operation.result.done():
            return None
        operation.expires_at = min(operation.expires_at, time.monotonic() + DELIVERED_RESULT_TTL_SECONDS)
        return operation.result.result()

    def close_queue(self, queue_name: str) -> None:
        """Remove a queue and fail the operations that are waiting in it."""
        sequence_queue = self._queues.pop(queue_name, None)
        if sequence_queue is not None:
            sequence_queue.cancel_gap_timer()
            self._fail_waiting(
                sequence_queue, ProtocolError(f"{queue_name} was closed before this operation ran", 404)
            )
            sequence_queue.operations.clear()

    async def close(self) -> None:
        self._is_closed = True
        for queue in self._queues.values():
            queue.cancel_gap_timer()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        error = ProtocolError("the server is shutting down", 503, "server")
        for operation in self._operations.values():
            self._finish(operation, OperationResult(error=error))

    def _find_duplicate(
        self, kind: str, owner: str, queue_name: str | None, seq: int | None, offset: int, key: str | None
    ) -> _Operation | None:
        """Return the operation that the request repeats, if any. Raises `submit`'s 400 and 409 errors."""
        operation = self._operations_by_key.get((owner, key)) if key is not None else None
        subject, action = "this idempotency key", "use a different key"
        if operation is None and queue_name is not None and seq is not None:
            sequence_queue = self._queues.get(queue_name, _SequenceQueue(queue_name))
            max_seq = sequence_queue.next_seq + self._limits.max_operations
            if not 1 <= seq <= max_seq:
                raise ProtocolError(
                    f"sequence id {seq - offset} for {queue_name} is out of range; sequence ids start at 1, "
                    f"and the highest one allowed now is {max_seq - offset}"
                )
            operation = sequence_queue.operations.get(seq)
            subject, action = f"sequence id {seq - offset} of {queue_name}", _SEQUENCE_HINT
            if operation is None and seq < sequence_queue.next_seq:
                raise ProtocolError(
                    f"the operation with {subject} has already run and its result has expired, or the "
                    f"request arrived too late; {_SEQUENCE_HINT}",
                    409,
                )
        if operation is not None and (operation.kind != kind or operation.owner != owner):
            raise ProtocolError(
                f"{subject} was already used for a different operation ({operation.kind}); {action}", 409
            )
        return operation

    # --- running ---

    def _advance(self, queue: _SequenceQueue) -> None:
        """Start the next operation in a queue, or the gap timer if only later ones have arrived."""
        if queue.is_running or self._is_closed:
            return
        operation = queue.operations.get(queue.next_seq)
        if operation is not None:
            queue.cancel_gap_timer()
            queue.is_running = True
            queue.offset = operation.offset
            self._start(operation)
        elif queue.gap_timer is None and any(seq > queue.next_seq for seq in queue.operations):
            loop = asyncio.get_running_loop()
            queue.gap_timer = loop.call_later(self._limits.sequence_gap_timeout, self._on_gap_timeout, queue)

    def _on_gap_timeout(self, queue: _SequenceQueue) -> None:
        queue.gap_timer = None
        self._fail_waiting(
            queue,
            ProtocolError(
                f"the operation was not run, because sequence id {queue.next_seq - queue.offset} of "
                f"{queue.name} did not arrive within {self._limits.sequence_gap_timeout:g} s; send "
                f"that operation and all later ones again, and {_SEQUENCE_HINT}"
            ),
        )
        # Otherwise all later operations would wait for a sequence id that the client may never send.
        queue.next_seq = max(queue.operations) + 1

    def _fail_waiting(self, queue: _SequenceQueue, error: ProtocolError) -> None:
        for seq, operation in queue.operations.items():
            if not (queue.is_running and seq == queue.next_seq):
                self._finish(operation, OperationResult(error=error))

    def _start(self, operation: _Operation) -> None:
        task = asyncio.create_task(self._run(operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, operation: _Operation) -> None:
        assert operation.function is not None
        try:
            result = OperationResult(await operation.function())
        except Exception as error:  # noqa: BLE001 - every error is sent to the client as the result
            result = OperationResult(error=to_protocol_error(error))
        self._finish(operation, result)
        if operation.queue is not None:
            operation.queue.is_running = False
            operation.queue.next_seq += 1
            self._advance(operation.queue)

    def _finish(self, operation: _Operation, result: OperationResult) -> None:
        if operation.result.done():
            return
        operation.function = None
        operation.result.set_result(result)
        operation.expires_at = time.monotonic() + self._limits.result_ttl
        self._pending_count -= 1

    def _sweep(self) -> None:
        now = time.monotonic()
        if now < self._swept_at + min(SWEEP_INTERVAL_SECONDS, self._limits.result_ttl):
            return
        self._swept_at = now
        for operation in [o for o in self._operations.values() if o.expires_at < now]:
            del self._operations[operation.operation_id]
            if operation.key is not None:
                self._operations_by_key.pop((operation.owner, operation.key), None)
            if operation.queue is not None and operation.seq is not None:
                operation.queue.operations.pop(operation.seq, None)
