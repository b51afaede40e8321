from __future__ import annotations

import asyncio

import pytest

from instar.gateway.pipeline.sample import Deadline


async def test_deadline_exceeded_raises_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        with Deadline(0.01):
            await asyncio.sleep(5)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_deadline_not_reached_has_no_effect() -> None:
    with Deadline(0.02):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


async def test_deadline_propagates_other_errors() -> None:
    with pytest.raises(KeyError):
        with Deadline(1):
            raise KeyError


async def test_deadline_propagates_other_cancellations() -> None:
    async def work() -> None:
        with Deadline(5):
            await asyncio.sleep(5)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("outer_seconds", "inner_seconds"), [(5, 0.01), (0.01, 5)])
async def test_nested_deadlines_raise_at_the_earlier_one(outer_seconds: float, inner_seconds: float) -> None:
    with pytest.raises(TimeoutError):
        with Deadline(outer_seconds), Deadline(inner_seconds):
            await asyncio.sleep(5)
