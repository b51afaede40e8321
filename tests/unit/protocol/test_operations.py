"""Operations run in the order of their sequence ids, each once, and their results can be asked for."""

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
    made = OperationScheduler(LIMITS)
    yield made
    await made.close()


def gives(value: object) -> Callable[[], Awaitable[object]]:
    async def work() -> object:
        return value

    return work


async def value_of(operations: OperationScheduler, operation_id: str) -> Any:
    outcome = await operations.wait(operation_id, "me", 5)
    assert outcome is not None
    assert outcome.error is None, outcome.error
    return outcome.value


async def error_of(operations: OperationScheduler, operation_id: str) -> ProtocolError:
    outcome = await operations.wait(operation_id, "me", 5)
    assert outcome is not None
    assert outcome.error is not None
    return outcome.error


async def test_queue_runs_operations_in_the_order_of_sequence_ids() -> None:
    operations = OperationScheduler(ServiceLimits(max_operations=200))
    ran: list[int] = []
    running = 0

    def work(seq: int) -> Callable[[], Awaitable[int]]:
        async def run() -> int:
            nonlocal running
            running += 1
            assert running == 1, "two of one lane ran at once"
            await asyncio.sleep(0)
            ran.append(seq)
            running -= 1
            return seq

        return run

    order = list(range(1, 101))
    random.Random(7).shuffle(order)
    ids = {}
    for seq in order:
        ids[seq] = operations.submit("step", "me", work(seq), queue="model", seq=seq)
        await asyncio.sleep(0)
    assert [await value_of(operations, ids[seq]) for seq in range(1, 101)] == list(range(1, 101))
    assert ran == list(range(1, 101))
    await operations.close()


async def test_queues_run_independently(operations: OperationScheduler) -> None:
    gate = asyncio.Event()
    slow = operations.submit("step", "me", gate.wait, queue="a", seq=1)
    assert await value_of(operations, operations.submit("step", "me", gives(2), queue="b", seq=1)) == 2
    assert await value_of(operations, operations.submit("ask", "me", gives(3), queue="a")) == 3
    assert await operations.wait(slow, "me", 0.01) is None
    gate.set()
    assert await value_of(operations, slow) is True


async def test_wait_returns_when_the_operation_is_done(operations: OperationScheduler) -> None:
    async def work() -> str:
        await asyncio.sleep(0.05)
        return "done"

    operation = operations.submit("sample", "me", work)
    started = asyncio.get_running_loop().time()
    waits = await asyncio.gather(*(operations.wait(operation, "me", 30) for _ in range(5)))
    assert [outcome and outcome.value for outcome in waits] == ["done"] * 5
    assert asyncio.get_running_loop().time() - started < 1


async def test_repeated_key_or_sequence_id_returns_the_same_operation(
    operations: OperationScheduler,
) -> None:
    runs: list[int] = []

    async def work() -> int:
        runs.append(1)
        return len(runs)

    first = operations.submit("step", "me", work, queue="m", seq=1, key="k")
    assert operations.submit("step", "me", work, queue="m", seq=1, key="k") == first
    assert operations.submit("step", "me", work, queue="m", seq=1, key="another try") == first
    assert operations.submit("step", "me", work, key="k") == first
    assert await value_of(operations, first) == 1
    assert operations.submit("step", "me", work, queue="m", seq=1) == first
    assert await value_of(operations, first) == 1
    # A key is its owner's own.
    other = operations.submit("step", "you", work, key="k")
    assert other != first


async def test_sequence_id_or_key_of_another_kind_is_rejected(operations: OperationScheduler) -> None:
    operations.submit("step", "me", gives(1), queue="m", seq=1, key="k")
    with pytest.raises(ProtocolError, match="sequence id 1 of m") as refused:
        operations.submit("save", "me", gives(1), queue="m", seq=1)
    assert refused.value.status == 409
    with pytest.raises(ProtocolError, match="idempotency key"):
        operations.submit("save", "me", gives(1), queue="m", seq=2, key="k")
    with pytest.raises(ProtocolError, match="begin with 1"):
        operations.submit("save", "me", gives(1), queue="m", seq=0)


async def test_failed_operation_is_reported_and_the_next_one_runs(
    operations: OperationScheduler,
) -> None:
    def fails(error: Exception) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            raise error

        return work

    errors = [
        (ProtocolError("no such loss", 422), 422, "user", "no such loss"),
        (NonFiniteError("the loss is nan"), 400, "user", "the loss is nan"),
        (BackendError("token 9 is outside"), 400, "user", "token 9 is outside"),
        (EngineUnavailable("the engine is closed"), 503, "server", "the engine is closed"),
        (KeyError("a secret"), 500, "server", "internal error: KeyError"),
    ]
    for seq, (error, status, category, text) in enumerate(errors, 1):
        reported = await error_of(
            operations, operations.submit("step", "me", fails(error), queue="m", seq=seq)
        )
        assert (reported.status, reported.category, str(reported)) == (status, category, text)
    assert await value_of(operations, operations.submit("step", "me", gives(6), queue="m", seq=6)) == 6


async def test_sequence_gap_timeout_fails_the_waiting_operations(operations: OperationScheduler) -> None:
    behind = [operations.submit("step", "me", gives(seq), queue="m", seq=seq) for seq in (3, 2)]
    for operation in behind:
        reported = await error_of(operations, operation)
        assert "sequence id 1 of m" in str(reported)
    # The lane goes on: what failed stays failed, what comes after runs.
    fourth = operations.submit("step", "me", gives(4), queue="m", seq=4)
    assert await value_of(operations, operations.submit("step", "me", gives(1), queue="m", seq=1)) == 1
    assert await value_of(operations, fourth) == 4
    assert operations.submit("step", "me", gives(2), queue="m", seq=2) == behind[1]


async def test_sequence_gap_that_closes_in_time_fails_nothing(operations: OperationScheduler) -> None:
    third = operations.submit("step", "me", gives(3), queue="m", seq=3)
    await asyncio.sleep(LIMITS.sequence_gap_timeout / 2)
    operations.submit("step", "me", gives(1), queue="m", seq=1)
    await asyncio.sleep(LIMITS.sequence_gap_timeout * 0.75)
    # Waiting for 2 began when 1 was done.
    operations.submit("step", "me", gives(2), queue="m", seq=2)
    assert await value_of(operations, third) == 3


async def test_operations_over_the_limit_are_rejected_until_one_is_done(
    operations: OperationScheduler,
) -> None:
    gate = asyncio.Event()
    ids = [operations.submit("sample", "me", gate.wait) for _ in range(LIMITS.max_operations)]
    with pytest.raises(ProtocolError) as refused:
        operations.submit("sample", "me", gate.wait)
    assert refused.value.status == 429
    gate.set()
    for operation in ids:
        assert await value_of(operations, operation) is True
    assert await value_of(operations, operations.submit("sample", "me", gives(1))) == 1


async def test_expired_results_are_not_computed_again(operations: OperationScheduler) -> None:
    operation = operations.submit("step", "me", gives(1), queue="m", seq=1, key="k")
    assert await value_of(operations, operation) == 1
    await asyncio.sleep(2.2 * LIMITS.result_ttl)
    with pytest.raises(ProtocolError, match="expired") as unknown:
        await operations.wait(operation, "me", 1)
    assert unknown.value.status == 404
    with pytest.raises(ProtocolError, match="was run already") as refused:
        operations.submit("step", "me", gives(1), queue="m", seq=1)
    assert refused.value.status == 409
    assert await value_of(operations, operations.submit("step", "me", gives(2), queue="m", seq=2)) == 2


async def test_operations_of_another_owner_are_not_found(operations: OperationScheduler) -> None:
    operation = operations.submit("sample", "you", gives(1))
    for unknown in (operation, "op-unheard-of"):
        with pytest.raises(ProtocolError) as refused:
            await operations.wait(unknown, "me", 1)
        assert refused.value.status == 404


async def test_closing_a_queue_fails_its_waiting_operations(operations: OperationScheduler) -> None:
    gate = asyncio.Event()
    running = operations.submit("step", "me", gate.wait, queue="m", seq=1)
    waiting = operations.submit("step", "me", gives(2), queue="m", seq=2)
    await asyncio.sleep(0)
    operations.close_queue("m")
    assert "ended before" in str(await error_of(operations, waiting))
    gate.set()
    assert await value_of(operations, running) is True


async def test_closing_the_scheduler_wakes_all_waiters() -> None:
    operations = OperationScheduler(LIMITS)
    running = operations.submit("step", "me", asyncio.Event().wait, queue="m", seq=1)
    waiting = operations.submit("step", "me", gives(2), queue="m", seq=2)
    waits = [asyncio.create_task(operations.wait(op, "me", 30)) for op in (running, waiting)]
    await asyncio.sleep(0.01)
    await operations.close()
    for wait in waits:
        outcome = await asyncio.wait_for(wait, 1)
        assert outcome is not None
        assert outcome.error is not None
        assert outcome.error.status == 503
    with pytest.raises(ProtocolError, match="closing"):
        operations.submit("step", "me", gives(1))
