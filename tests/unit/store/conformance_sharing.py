"""Conformance tests for concurrent writers. Each store has its own writer, as on a separate host."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from instar.errors import ConflictError, LeaseLost
from instar.store.base import Store
from instar.types import (
    Artifact,
    Channel,
    GroupStatus,
    Policy,
    Reward,
    RewardSource,
    SessionStatus,
    StepState,
)

from .factories import (
    CALCULATOR,
    POLICY_ID,
    RUN_ID,
    make_call,
    make_claim,
    make_dropped_claim,
    make_group,
    make_session,
)

StoreFactory = Callable[[], Store]
STORE_COUNT = 3


class SeveralStoresTests:
    @pytest.fixture
    async def stores(self, open_store: StoreFactory) -> AsyncIterator[list[Store]]:
        """Several stores that share one database."""
        async with AsyncExitStack() as stack:
            stores = [open_store() for _ in range(STORE_COUNT)]
            for store in stores:
                stack.push_async_callback(store.close)
            yield stores

    async def test_write_after_losing_the_lease_raises(self, stores: list[Store]) -> None:
        driver, old_trainer, new_trainer = stores
        await old_trainer.hold_lease(RUN_ID, "trainer", await driver.take_lease(RUN_ID, "trainer"))
        await old_trainer.claim_step(RUN_ID, 1, [make_claim("k")])
        assert await driver.lease(RUN_ID, "trainer") == 1
        lease = await driver.take_lease(RUN_ID, "trainer")
        assert await driver.lease(RUN_ID, "trainer") == lease == 2
        with pytest.raises(LeaseLost, match="taken over the trainer of run 'run'"):
            await old_trainer.advance_step(RUN_ID, 1, StepState.SUBMITTED)
        await new_trainer.hold_lease(RUN_ID, "trainer", lease)
        assert await new_trainer.release_steps(RUN_ID, 0) == [1]
        outcomes = await asyncio.gather(
            old_trainer.claim_step(RUN_ID, 1, [make_claim("k")]),
            old_trainer.open_group(make_group("g")),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [LeaseLost, LeaseLost]
        assert await new_trainer.claims(RUN_ID) == []
        assert await new_trainer.groups(RUN_ID, Channel.TRAIN) == []
        with pytest.raises(LeaseLost):
            await driver.hold_lease(RUN_ID, "trainer", lease - 1)
        await driver.open_group(make_group("g"))  # the driver holds no lease, so it can still write
        await new_trainer.claim_step(RUN_ID, 1, [make_claim("k")])
        assert await driver.lease(RUN_ID, "gateway") == 0
        assert await driver.take_lease(RUN_ID, "gateway") == 1
        assert await driver.take_lease("another", "trainer") == 1

    async def test_claim_step_from_several_stores_claims_each_sample_once(self, stores: list[Store]) -> None:
        """Each store claims all groups in a different order, in steps of two groups."""
        groups = [f"g{i}" for i in range(12)]
        for index, group in enumerate(groups):
            await stores[0].open_group(make_group(group, index, status=GroupStatus.READY))

        async def claim(store_index: int) -> list[str]:
            order = groups[4 * store_index :] + groups[: 4 * store_index]
            claimed: list[str] = []
            for start in range(0, 12, 2):
                batch = order[start : start + 2]
                try:
                    claims = [make_claim(f"k-{group}", group_id=group) for group in batch]
                    await stores[store_index].claim_step(RUN_ID, 100 * store_index + start, claims)
                    claimed += batch
                except ConflictError:
                    continue
            return claimed

        claimed_by_store = await asyncio.gather(*(claim(store_index) for store_index in range(STORE_COUNT)))
        assert Counter(group for claimed in claimed_by_store for group in claimed) == Counter(groups)
        assert len(await stores[0].claims(RUN_ID)) == 12
        assert await stores[0].groups(RUN_ID, Channel.TRAIN, unclaimed_in_epoch=0) == []

    async def test_groups_consumed_is_correct_under_concurrent_drops_and_claims(
        self, stores: list[Store]
    ) -> None:
        """One store drops a sample of each group. Another claims one and commits every other step."""
        count = 12
        for index in range(count):
            await stores[0].open_group(make_group(f"g{index}", index, status=GroupStatus.READY))

        async def drop(store: Store) -> None:
            for index in range(count):
                await store.drop_samples([make_dropped_claim(f"d{index}", group_id=f"g{index}")])

        async def train(store: Store) -> None:
            for index in reversed(range(count)):
                await store.claim_step(RUN_ID, index, [make_claim(f"k{index}", group_id=f"g{index}")])
                if index % 2 == 0:
                    await store.advance_step(RUN_ID, index, StepState.COMMITTED)

        await asyncio.gather(drop(stores[1]), train(stores[2]))
        progress = await stores[0].progress(RUN_ID)
        assert (progress.groups_consumed, progress.groups_ready) == (count // 2, count // 2)
        assert progress.committed_steps == count // 2

    async def test_end_session_from_several_stores_succeeds_once(self, stores: list[Store]) -> None:
        session_ids = [f"s{i}" for i in range(10)]
        for session_id in session_ids:
            await stores[0].open_session(make_session(session_id))

        async def end(store: Store, order: list[str]) -> int:
            results = await asyncio.gather(
                *(
                    store.end_session(
                        session_id,
                        SessionStatus.COMPLETED,
                        rewards=[Reward(session_id, 1.0, RewardSource.RULE)],
                    )
                    for session_id in order
                )
            )
            return sum(results)

        orders = (session_ids, session_ids[::-1], session_ids)
        ended_counts = await asyncio.gather(
            *(end(store, order) for store, order in zip(stores, orders, strict=True))
        )
        assert sum(ended_counts) == len(session_ids)
        rewards = [await stores[1].rewards(session_id) for session_id in session_ids]
        assert [len(session_rewards) for session_rewards in rewards] == [1] * len(session_ids)
        assert (await stores[2].progress(RUN_ID)).sessions == {"completed": 10}

    async def test_progress_counts_are_correct_under_concurrent_writes(self, stores: list[Store]) -> None:
        """All stores open and close sessions and groups concurrently, in transactions with many writes."""

        async def work(store_index: int) -> None:
            store = stores[store_index]
            sessions = [f"s{store_index}-{i}" for i in range(20)]
            groups = [f"g{store_index}-{i}" for i in range(20)]
            await asyncio.gather(
                *(store.open_session(make_session(name)) for name in sessions),
                *(store.open_group(make_group(name, i)) for i, name in enumerate(groups)),
            )
            other = stores[(store_index + 1) % STORE_COUNT]
            await asyncio.gather(
                *(other.close_group(name, GroupStatus.READY) for name in groups[::2]),
                *(other.end_session(name, SessionStatus.FAILED, "x") for name in sessions[::4]),
                *(store.close_group(name, GroupStatus.DROPPED, "x") for name in groups[1::4]),
            )

        await asyncio.gather(*(work(store_index) for store_index in range(STORE_COUNT)))
        progress = await stores[0].progress(RUN_ID)
        assert progress.sessions == {"open": 15 * STORE_COUNT, "failed": 5 * STORE_COUNT}
        counts = (progress.groups_ready, progress.groups_consumed, progress.groups_open)
        assert counts == (10 * STORE_COUNT, 5 * STORE_COUNT, 5 * STORE_COUNT)
        assert len(await stores[0].sessions(RUN_ID, status=SessionStatus.OPEN)) == 15 * STORE_COUNT

    async def test_closed_group_has_no_open_session_under_concurrent_writes(
        self, stores: list[Store]
    ) -> None:
        groups = [f"g{index}" for index in range(20)]
        for index, name in enumerate(groups):
            await stores[0].open_group(make_group(name, index))

        async def open_sessions(store: Store, store_index: int) -> None:
            for name in groups:
                with contextlib.suppress(ConflictError):
                    await store.open_session(make_session(f"{name}-{store_index}", group_id=name))

        async def close_groups() -> None:
            for name in groups:
                await stores[0].close_group(name, GroupStatus.READY)

        await asyncio.gather(
            close_groups(), *(open_sessions(store, index) for index, store in enumerate(stores))
        )
        assert await stores[0].sessions(RUN_ID, status=SessionStatus.OPEN) == []

    async def test_reserve_version_from_several_stores_never_repeats(self, stores: list[Store]) -> None:
        async def publish(store: Store) -> list[int]:
            versions: list[int] = []
            for step in range(6):
                version = await store.reserve_version(POLICY_ID, RUN_ID, step)
                versions.append(version)
                if step % 2:
                    await store.publish(Policy(POLICY_ID, version, Artifact("base")))
                else:
                    await store.tombstone(POLICY_ID, version, "abandoned")
            return versions

        versions_by_store = await asyncio.gather(*(publish(store) for store in stores))
        assert sorted(version for versions in versions_by_store for version in versions) == list(
            range(1, 6 * STORE_COUNT + 1)
        )
        assert len(await stores[0].published_policies(POLICY_ID)) == 3 * STORE_COUNT

    async def test_secret_from_several_stores_is_the_same(self, stores: list[Store]) -> None:
        values = await asyncio.gather(*(store.secret(name) for name in ("a", "b") for store in stores * 2))
        assert len(set(values)) == 2

    async def test_call_deltas_under_concurrent_writes_only_append(self, stores: list[Store]) -> None:
        """All stores write calls to one session, and every read extends the previous one."""
        await stores[0].open_session(make_session())

        async def write(store_index: int) -> None:
            for turn in range(8):
                names = [f"{store_index}-{turn}-{i}" for i in range(4)]
                await asyncio.gather(
                    *(stores[store_index].add_calls([make_call(name, tools=(CALCULATOR,))]) for name in names)
                )

        writes = asyncio.gather(*(write(store_index) for store_index in range(STORE_COUNT)))
        previous: list[str] = []
        while not writes.done():
            current = [delta.call_id for delta in await stores[0].call_deltas("s")]
            assert current[: len(previous)] == previous
            previous = current
        await writes
        assert len(await stores[0].calls("s")) == 32 * STORE_COUNT

    async def test_add_calls_from_several_stores_stores_each_call_once(self, stores: list[Store]) -> None:
        """All stores add the same calls, each in a new session."""

        async def add(store: Store, number: int) -> bool:
            try:
                call = make_call(f"c{number}", f"s{number}", tools=(CALCULATOR,))
                await store.add_calls([call], new_session=make_session(f"s{number}"))
            except ConflictError:
                return False
            return True

        results = await asyncio.gather(*(add(store, number) for number in range(20) for store in stores))
        assert sum(results) == 20
        assert [row.call_count for row in await stores[0].sessions(RUN_ID)] == [1] * 20
