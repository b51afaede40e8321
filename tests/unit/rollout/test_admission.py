from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from instar.data.batcher import Batcher
from instar.rollout.admission import MAX_STATE_AGE_SECONDS, Admission
from instar.store.base import Store
from instar.store.database import Database
from instar.store.sqlite import SqliteStore
from instar.types import GroupStatus, StepState
from tests.unit.data.builders import RUN, add_group, make_config, put_test_run

T = TypeVar("T")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = SqliteStore(tmp_path / "store.db")
    await put_test_run(store)
    yield store
    await store.close()


class SimulatedRun:
    """Starts groups, and claims and commits steps, without agents or a backend."""

    def __init__(self, store: Store, **trainer: Any) -> None:
        self.store = store
        self.config = make_config(**trainer)
        self.admission = Admission(self.config, store, RUN)
        self.batcher = Batcher(store, RUN, self.config)

    async def fill(self, rewards: tuple[float, ...] = (1.0, 0.0), version: int = 0) -> int:
        """Start groups until admission allows no more, and return their number."""
        started = 0
        while (state := await self.admission.read_state()).startable_groups:
            await add_group(self.store, state.next_group_index, list(rewards), version=version)
            started += 1
        return started

    async def claim(self, step: int, version: int = 0) -> None:
        batch = await self.batcher.next_batch(step, 0, version, timeout=0.0)
        assert batch is not None
        await self.store.drop_samples(batch.drops)
        await self.store.claim_step(RUN, step, batch.claims)

    async def commit(self, step: int) -> None:
        await self.store.advance_step(RUN, step, StepState.COMMITTED)


@pytest.mark.parametrize(
    ("settings", "expected_groups"),
    [
        ({"mode": "sync"}, 3),
        ({"max_staleness": 0}, 3),
        ({"max_staleness": 2}, 9),
        ({"max_staleness": 2, "sync": {"every": 2}}, 6),
    ],
)
async def test_admission_limits_groups_ahead_of_training(
    store: Store, settings: dict[str, Any], expected_groups: int
) -> None:
    run = SimulatedRun(store, groups_per_step=3, steps=10, **settings)
    assert await run.fill() == expected_groups
    await run.claim(1)
    assert await run.fill() == 0, "the step is claimed, but its version is not published"
    await run.commit(1)
    assert await run.fill() == 3


async def test_admission_starts_no_more_groups_than_steps_need(store: Store) -> None:
    run = SimulatedRun(store, groups_per_step=2, steps=2, max_staleness=9)
    assert await run.fill() == 4
    for step in (1, 2):
        assert not (await run.admission.read_state()).is_finished
        await run.claim(step)
        await run.commit(step)
        assert await run.fill() == 0
    assert (await run.admission.read_state()).is_finished


async def test_admission_replaces_dropped_groups(store: Store) -> None:
    run = SimulatedRun(store, groups_per_step=2, steps=2, mode="sync")
    assert await run.fill() == 2
    await store.close_group(f"{RUN}/train/000001", GroupStatus.DROPPED, "session_failed")
    assert await run.fill() == 1
    assert await run.fill() == 0
    assert await run.batcher.next_batch(1, 0, 7, timeout=0.0) is None, "both groups are too old for version 7"
    assert await run.fill(version=7) == 2
    await run.claim(1, version=7)
    await run.commit(1)
    assert await run.fill(version=8) == 2
    await run.claim(2, version=8)
    await run.commit(2)
    assert await run.fill() == 0


async def test_admission_counts_groups_without_signal_until_their_step_ends(store: Store) -> None:
    """The step consumes the groups. Groups that start before its version is published would be stale."""
    run = SimulatedRun(store, groups_per_step=2, steps=2, mode="sync")
    assert await run.fill(rewards=(1.0, 1.0)) == 2
    await run.claim(1)
    assert await run.fill() == 0
    await run.commit(1)
    assert await run.fill() == 2
    assert await run.fill() == 0


async def test_admission_counts_published_steps_before_commit(store: Store) -> None:
    run = SimulatedRun(store, groups_per_step=2, steps=4, mode="sync")
    await run.fill()
    await run.claim(1)
    await store.advance_step(RUN, 1, StepState.SUBMITTED, version=1)
    await asyncio.sleep(MAX_STATE_AGE_SECONDS)
    assert await run.fill(version=1) == 2
    await run.claim(2, version=1)
    await store.advance_step(RUN, 2, StepState.SUBMITTED, version=2)
    for step in (1, 2):
        await run.commit(step)
    assert await run.fill(version=2) == 2


class InterruptedStore(SqliteStore):
    """A store whose steps are released, as if by another process, after ``released_after`` reads."""

    released_after = 0
    reads = 0

    async def read(self, fetch: Callable[[Database], T]) -> T:
        result = await super().read(fetch)
        self.reads += 1
        if self.reads == self.released_after:
            await self.release_steps(RUN, after=0)
        return result


@pytest.mark.parametrize("released_after", [1, 2, 3])
async def test_admission_starts_no_extra_group_if_steps_are_released_while_it_reads(
    tmp_path: Path, released_after: int
) -> None:
    store = InterruptedStore(tmp_path / "store.db")
    try:
        await put_test_run(store)
        run = SimulatedRun(store, groups_per_step=2, steps=4, mode="sync")
        assert await run.fill() == 2
        await run.claim(1)
        store.released_after = store.reads + released_after
        admission = Admission(run.config, store, RUN)
        assert (await admission.read_state()).startable_groups == 0, "the two groups of step 1 still exist"
    finally:
        await store.close()
