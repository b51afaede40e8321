from __future__ import annotations

import asyncio

import pytest

from instar.gateway.pipeline.sample import Deadline


async def test_what_takes_too_long_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        with Deadline(0.01):
            await asyncio.sleep(5)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_ends_in_time_is_left_alone() -> None:
    with Deadline(0.02):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


async def test_its_own_error_passes() -> None:
    with pytest.raises(KeyError):
        with Deadline(1):
            raise KeyError


async def test_someone_elses_cancelling_stays_one() -> None:
    async def work() -> None:
        with Deadline(5):
            await asyncio.sleep(5)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("outer", "inner"), [(5, 0.01), (0.01, 5)])
async def test_the_first_of_two_deadlines_counts(outer: float, inner: float) -> None:
    with pytest.raises(TimeoutError):
        with Deadline(outer), Deadline(inner):
            await asyncio.sleep(5)
