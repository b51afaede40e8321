"""Tests that operations run once, in the order of their sequence ids, and that results can be fetched."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from instar.errors import BackendError, EngineUnavailable, NonFiniteError
from instar.protocol.base import ProtocolError, ServiceLimits
from instar.protocol.operations import OperationScheduler

LIMITS = ServiceLimits(max_operations=8, result_ttl=0.3, sequence_gap_timeout=0.2)


@pytest.fixture
async def operations() -> AsyncGenerator[OperationScheduler]:
    scheduler = OperationScheduler(LIMITS)
    yield scheduler
    await scheduler.close()


def return_value(value: object) -> Callable[[], Awaitable[object]]:
    async def work() -> object:
        return value

    return work


async def get_value(operations: OperationScheduler, operation_id: str) -> Any:
    outcome = await operations.wait(operation_id, "me", 5)
    assert outcome is not None
    assert outcome.error is None, outcome.error
    return outcome.value


async def get_error(operations: OperationScheduler, operation_id: str) -> ProtocolError:
    outcome = await operations.wait(operation_id, "me", 5)
    assert outcome is not None
    assert outcome.error is not None
    return outcome.error


async def test_queue_runs_operations_in_sequence_order() -> None:
    operations = OperationScheduler(ServiceLimits(max_operations=200))
    completed: list[int] = []
    running = 0

    def work(seq: int) -> Callable[[], Awaitable[int]]:
        async def run() -> int:
            nonlocal running
            running += 1
            assert running == 1, "two operations of one queue ran concurrently"
            await asyncio.sleep(0)
            completed.append(seq)
            running -= 1
            return seq

        return run

    order = list(range(1, 101))
    random.Random(7).shuffle(order)
    ids = {}
    for seq in order:
        ids[seq] = operations.submit("step", "me", work(seq), queue_name="model", seq=seq)
        await asyncio.sleep(0)
    assert [await get_value(operations, ids[seq]) for seq in range(1, 101)] == list(range(1, 101))
    assert completed == list(range(1, 101))
    await operations.close()


async def test_queues_run_independently(operations: OperationScheduler) -> None:
    gate = asyncio.Event()
    slow = operations.submit("step", "me", gate.wait, queue_name="a", seq=1)
    assert (
        await get_value(operations, operations.submit("step", "me", return_value(2), queue_name="b", seq=1))
        == 2
    )
    assert (
        await get_value(operations, operations.submit("sample", "me", return_value(3), queue_name="a")) == 3
    )
    assert await operations.wait(slow, "me", 0.01) is None
    gate.set()
    assert await get_value(operations, slow) is True


async def test_wait_returns_when_the_operation_is_done(operations: OperationScheduler) -> None:
    async def work() -> str:
        await asyncio.sleep(0.05)
        return "done"

    operation = operations.submit("sample", "me", work)
    start = asyncio.get_running_loop().time()
    outcomes = await asyncio.gather(*(operations.wait(operation, "me", 30) for _ in range(5)))
    assert [outcome and outcome.value for outcome in outcomes] == ["done"] * 5
    assert asyncio.get_running_loop().time() - start < 1


async def test_repeated_key_or_sequence_id_returns_the_same_operation(
    operations: OperationScheduler,
) -> None:
    runs: list[int] = []

    async def work() -> int:
        runs.append(1)
        return len(runs)

    first = operations.submit("step", "me", work, queue_name="m", seq=1, key="k")
    assert operations.submit("step", "me", work, queue_name="m", seq=1, key="k") == first
    assert operations.submit("step", "me", work, queue_name="m", seq=1, key="retry") == first
    assert operations.submit("step", "me", work, key="k") == first
    assert await get_value(operations, first) == 1
    assert operations.submit("step", "me", work, queue_name="m", seq=1) == first
    assert await get_value(operations, first) == 1
    # Each owner has separate keys.
    assert operations.submit("step", "you", work, key="k") != first


async def test_sequence_id_or_key_of_another_operation_is_rejected(operations: OperationScheduler) -> None:
    operations.submit("step", "me", return_value(1), queue_name="m", seq=1, key="k")
    with pytest.raises(ProtocolError, match="sequence id 1 of m") as caught:
        operations.submit("save", "me", return_value(1), queue_name="m", seq=1)
    assert caught.value.status == 409
    with pytest.raises(ProtocolError, match="idempotency key"):
        operations.submit("save", "me", return_value(1), queue_name="m", seq=2, key="k")
    with pytest.raises(ProtocolError, match="start at 1"):
        operations.submit("save", "me", return_value(1), queue_name="m", seq=0)


async def test_failed_operation_is_reported_and_the_next_one_runs(
    operations: OperationScheduler,
) -> None:
    def raise_error(error: Exception) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            raise error

        return work

    errors = [
        (ProtocolError("unknown loss", 422), 422, "user", "unknown loss"),
        (NonFiniteError("the loss is nan"), 400, "user", "the loss is nan"),
        (BackendError("token 9 is outside"), 400, "user", "token 9 is outside"),
        (EngineUnavailable("the engine is closed"), 503, "server", "the engine is closed"),
        (KeyError("a secret"), 500, "server", "internal error: KeyError"),
    ]
    for seq, (error, status, category, text) in enumerate(errors, 1):
        caught = await get_error(
            operations, operations.submit("step", "me", raise_error(error), queue_name="m", seq=seq)
        )
        assert (caught.status, caught.category, str(caught)) == (status, category, text)
    assert (
        await get_value(operations, operations.submit("step", "me", return_value(6), queue_name="m", seq=6))
        == 6
    )


async def test_sequence_gap_timeout_fails_the_waiting_operations(operations: OperationScheduler) -> None:
    waiting = [operations.submit("step", "me", return_value(seq), queue_name="m", seq=seq) for seq in (3, 2)]
    for operation in waiting:
        error = await get_error(operations, operation)
        assert "sequence id 1 of m" in str(error)
    with pytest.raises(ProtocolError, match="arrived too late; use sequence ids above") as caught:
        operations.submit("step", "me", return_value(1), queue_name="m", seq=1)
    assert caught.value.status == 409
    assert operations.submit("step", "me", return_value(2), queue_name="m", seq=2) == waiting[1]
    for seq in (4, 5):
        operation = operations.submit("step", "me", return_value(seq), queue_name="m", seq=seq)
        assert await get_value(operations, operation) == seq


async def test_sequence_gaps_between_waiting_operations_time_out_together(
    operations: OperationScheduler,
) -> None:
    waiting = [operations.submit("step", "me", return_value(seq), queue_name="m", seq=seq) for seq in (2, 5)]
    for operation in waiting:
        assert "sequence id 1 of m" in str(await get_error(operations, operation))
    assert (
        await get_value(operations, operations.submit("step", "me", return_value(6), queue_name="m", seq=6))
        == 6
    )


async def test_sequence_id_far_ahead_of_the_queue_is_rejected(operations: OperationScheduler) -> None:
    with pytest.raises(ProtocolError, match=r"sequence id 1000 for m .* highest one allowed now is 9"):
        operations.submit("step", "me", return_value(1), queue_name="m", seq=1000)
    assert (
        await get_value(operations, operations.submit("step", "me", return_value(1), queue_name="m", seq=1))
        == 1
    )


async def test_rejected_sequence_id_does_not_block_later_operations(operations: OperationScheduler) -> None:
    second = operations.submit("step", "me", return_value(2), queue_name="m", seq=2)
    operations.reject("me", "m", 1, ProtocolError("learning_rate must be finite, got nan"))
    assert await get_value(operations, second) == 2
    with pytest.raises(ProtocolError, match=r"rejected request.; use sequence ids above the highest"):
        operations.submit("step", "me", return_value(1), queue_name="m", seq=1)


async def test_sequence_gap_that_closes_in_time_fails_no_operation(operations: OperationScheduler) -> None:
    third = operations.submit("step", "me", return_value(3), queue_name="m", seq=3)
    await asyncio.sleep(LIMITS.sequence_gap_timeout / 2)
    operations.submit("step", "me", return_value(1), queue_name="m", seq=1)
    await asyncio.sleep(LIMITS.sequence_gap_timeout * 0.75)
    # The wait for 2 began when 1 was done.
    operations.submit("step", "me", return_value(2), queue_name="m", seq=2)
    assert await get_value(operations, third) == 3


async def test_operations_over_the_limit_are_rejected_until_one_is_done(
    operations: OperationScheduler,
) -> None:
    gate = asyncio.Event()
    ids = [operations.submit("sample", "me", gate.wait) for _ in range(LIMITS.max_operations)]
    with pytest.raises(ProtocolError) as caught:
        operations.submit("sample", "me", gate.wait)
    assert caught.value.status == 429
    gate.set()
    for operation in ids:
        assert await get_value(operations, operation) is True
    assert await get_value(operations, operations.submit("sample", "me", return_value(1))) == 1


async def test_expired_results_are_not_computed_again(operations: OperationScheduler) -> None:
    operation = operations.submit("step", "me", return_value(1), queue_name="m", seq=1, key="k")
    assert await get_value(operations, operation) == 1
    await asyncio.sleep(2.2 * LIMITS.result_ttl)
    with pytest.raises(ProtocolError, match="expired") as expired:
        await operations.wait(operation, "me", 1)
    assert expired.value.status == 404
    with pytest.raises(ProtocolError, match="has already run") as caught:
        operations.submit("step", "me", return_value(1), queue_name="m", seq=1)
    assert caught.value.status == 409
    assert (
        await get_value(operations, operations.submit("step", "me", return_value(2), queue_name="m", seq=2))
        == 2
    )


async def test_operations_of_another_owner_are_not_found(operations: OperationScheduler) -> None:
    operation = operations.submit("sample", "you", return_value(1))
    for operation_id in (operation, "op-unknown"):
        with pytest.raises(ProtocolError) as caught:
            await operations.wait(operation_id, "me", 1)
        assert caught.value.status == 404


async def test_closing_a_queue_fails_its_waiting_operations(operations: OperationScheduler) -> None:
    gate = asyncio.Event()
    running = operations.submit("step", "me", gate.wait, queue_name="m", seq=1)
    waiting = operations.submit("step", "me", return_value(2), queue_name="m", seq=2)
    await asyncio.sleep(0)
    operations.close_queue("m")
    assert "was closed before" in str(await get_error(operations, waiting))
    gate.set()
    assert await get_value(operations, running) is True


async def test_closing_the_scheduler_wakes_all_waiters() -> None:
    operations = OperationScheduler(LIMITS)
    running = operations.submit("step", "me", asyncio.Event().wait, queue_name="m", seq=1)
    waiting = operations.submit("step", "me", return_value(2), queue_name="m", seq=2)
    wait_tasks = [asyncio.create_task(operations.wait(op, "me", 30)) for op in (running, waiting)]
    await asyncio.sleep(0.01)
    await operations.close()
    for wait_task in wait_tasks:
        outcome = await asyncio.wait_for(wait_task, 1)
        assert outcome is not None
        assert outcome.error is not None
        assert outcome.error.status == 503
    with pytest.raises(ProtocolError, match="shutting down"):
        operations.submit("step", "me", return_value(1))
