"""Conformance tests for concurrent writers. Each store has its own writer, as if it were on its own host."""

from __future__ import annotations

import asyncio
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
HOST_COUNT = 3


class SeveralHostsTests:
    @pytest.fixture
    async def hosts(self, open_store: StoreFactory) -> AsyncIterator[list[Store]]:
        """One store per host, all on the same storage."""
        async with AsyncExitStack() as stack:
            stores = [open_store() for _ in range(HOST_COUNT)]
            for store in stores:
                stack.push_async_callback(store.close)
            yield stores

    async def test_write_after_losing_the_lease_raises(self, hosts: list[Store]) -> None:
        driver, old, new = hosts
        await old.hold_lease(RUN_ID, "trainer", await driver.take_lease(RUN_ID, "trainer"))
        await old.claim_step(RUN_ID, 1, [make_claim("k")])
        lease = await driver.take_lease(RUN_ID, "trainer")
        with pytest.raises(LeaseLost, match="taken over the trainer of run 'run'"):
            await old.advance_step(RUN_ID, 1, StepState.SUBMITTED)
        await new.hold_lease(RUN_ID, "trainer", lease)
        assert await new.release_steps(RUN_ID, 0) == [1]
        outcomes = await asyncio.gather(
            old.claim_step(RUN_ID, 1, [make_claim("k")]),
            old.open_group(make_group("g")),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [LeaseLost, LeaseLost]
        assert await new.claims(RUN_ID) == []
        assert await new.groups(RUN_ID, Channel.TRAIN) == []
        with pytest.raises(LeaseLost):
            await driver.hold_lease(RUN_ID, "trainer", lease - 1)
        await driver.open_group(make_group("g"))  # it holds no lease, so it is not affected
        await new.claim_step(RUN_ID, 1, [make_claim("k")])
        assert await driver.take_lease(RUN_ID, "gateway") == 1
        assert await driver.take_lease("another", "trainer") == 1

    async def test_claim_step_from_several_hosts_claims_each_sample_once(self, hosts: list[Store]) -> None:
        """Each host claims all groups in a different order, in steps of two groups."""
        groups = [f"g{i}" for i in range(12)]
        for index, group in enumerate(groups):
            await hosts[0].open_group(make_group(group, index, status=GroupStatus.READY))

        async def claim(host_index: int) -> list[str]:
            order = groups[4 * host_index :] + groups[: 4 * host_index]
            claimed: list[str] = []
            for start in range(0, 12, 2):
                batch = order[start : start + 2]
                try:
                    claims = [make_claim(f"k-{group}", group_id=group) for group in batch]
                    await hosts[host_index].claim_step(RUN_ID, 100 * host_index + start, claims)
                    claimed += batch
                except ConflictError:
                    continue
            return claimed

        claimed_by_host = await asyncio.gather(*(claim(host_index) for host_index in range(HOST_COUNT)))
        assert Counter(group for claimed in claimed_by_host for group in claimed) == Counter(groups)
        assert len(await hosts[0].claims(RUN_ID)) == 12
        assert await hosts[0].groups(RUN_ID, Channel.TRAIN, unclaimed_in_epoch=0) == []

    async def test_groups_consumed_is_correct_under_concurrent_drops_and_claims(
        self, hosts: list[Store]
    ) -> None:
        """One host drops a sample of each group. Another claims one of each and commits half of them."""
        count = 12
        for index in range(count):
            await hosts[0].open_group(make_group(f"g{index}", index, status=GroupStatus.READY))

        async def drop(host: Store) -> None:
            for index in range(count):
                await host.drop_samples([make_dropped_claim(f"d{index}", group_id=f"g{index}")])

        async def train(host: Store) -> None:
            for index in reversed(range(count)):
                await host.claim_step(RUN_ID, index, [make_claim(f"k{index}", group_id=f"g{index}")])
                if index % 2 == 0:
                    await host.advance_step(RUN_ID, index, StepState.COMMITTED)

        await asyncio.gather(drop(hosts[1]), train(hosts[2]))
        progress = await hosts[0].progress(RUN_ID)
        assert (progress.groups_consumed, progress.groups_ready) == (count // 2, count // 2)
        assert progress.committed_steps == count // 2

    async def test_end_session_from_several_hosts_succeeds_once(self, hosts: list[Store]) -> None:
        session_ids = [f"s{i}" for i in range(10)]
        for session_id in session_ids:
            await hosts[0].open_session(make_session(session_id))

        async def end(host: Store, order: list[str]) -> int:
            ended = await asyncio.gather(
                *(
                    host.end_session(
                        session_id,
                        SessionStatus.COMPLETED,
                        rewards=[Reward(session_id, 1.0, RewardSource.RULE)],
                    )
                    for session_id in order
                )
            )
            return sum(ended)

        orders = (session_ids, session_ids[::-1], session_ids)
        ended = await asyncio.gather(*(end(host, order) for host, order in zip(hosts, orders, strict=True)))
        assert sum(ended) == len(session_ids)
        rewards = [await hosts[1].rewards(session_id) for session_id in session_ids]
        assert [len(session_rewards) for session_rewards in rewards] == [1] * len(session_ids)
        assert (await hosts[2].progress(RUN_ID)).sessions == {"completed": 10}

    async def test_progress_counts_are_correct_under_concurrent_writes(self, hosts: list[Store]) -> None:
        """All hosts open and close sessions and groups concurrently, in transactions with many writes."""

        async def work(host_index: int) -> None:
            store = hosts[host_index]
            sessions = [f"s{host_index}-{i}" for i in range(20)]
            groups = [f"g{host_index}-{i}" for i in range(20)]
            await asyncio.gather(
                *(store.open_session(make_session(name)) for name in sessions),
                *(store.open_group(make_group(name, i)) for i, name in enumerate(groups)),
            )
            other = hosts[(host_index + 1) % HOST_COUNT]
            await asyncio.gather(
                *(other.close_group(name, GroupStatus.READY) for name in groups[::2]),
                *(other.end_session(name, SessionStatus.FAILED, "x") for name in sessions[::4]),
                *(store.close_group(name, GroupStatus.DROPPED, "x") for name in groups[1::4]),
            )

        await asyncio.gather(*(work(host_index) for host_index in range(HOST_COUNT)))
        progress = await hosts[0].progress(RUN_ID)
        assert progress.sessions == {"open": 15 * HOST_COUNT, "failed": 5 * HOST_COUNT}
        counts = (progress.groups_ready, progress.groups_consumed, progress.groups_open)
        assert counts == (10 * HOST_COUNT, 5 * HOST_COUNT, 5 * HOST_COUNT)
        assert len(await hosts[0].sessions(RUN_ID, status=SessionStatus.OPEN)) == 15 * HOST_COUNT

    async def test_reserve_version_from_several_hosts_never_repeats(self, hosts: list[Store]) -> None:
        async def publish(host: Store) -> list[int]:
            versions: list[int] = []
            for step in range(6):
                version = await host.reserve_version(POLICY_ID, RUN_ID, step)
                versions.append(version)
                if step % 2:
                    await host.publish(Policy(POLICY_ID, version, Artifact("base")))
                else:
                    await host.tombstone(POLICY_ID, version, "abandoned")
            return versions

        versions_by_host = await asyncio.gather(*(publish(host) for host in hosts))
        assert sorted(version for versions in versions_by_host for version in versions) == list(
            range(1, 6 * HOST_COUNT + 1)
        )
        assert len(await hosts[0].published_policies(POLICY_ID)) == 3 * HOST_COUNT

    async def test_secret_from_several_hosts_is_the_same(self, hosts: list[Store]) -> None:
        values = await asyncio.gather(*(host.secret(name) for name in ("a", "b") for host in hosts * 2))
        assert len(set(values)) == 2

    async def test_call_deltas_under_concurrent_writes_only_grow_at_the_end(self, hosts: list[Store]) -> None:
        """All hosts write calls to one session, and every read extends the previous one."""
        await hosts[0].open_session(make_session())

        async def write(host_index: int) -> None:
            for turn in range(8):
                names = [f"{host_index}-{turn}-{i}" for i in range(4)]
                await asyncio.gather(
                    *(hosts[host_index].add_calls([make_call(name, tools=(CALCULATOR,))]) for name in names)
                )

        writing = asyncio.gather(*(write(host_index) for host_index in range(HOST_COUNT)))
        previous: list[str] = []
        while not writing.done():
            current = [delta.call_id for delta in await hosts[0].call_deltas("s")]
            assert current[: len(previous)] == previous
            previous = current
        await writing
        assert len(await hosts[0].calls("s")) == 32 * HOST_COUNT

    async def test_add_calls_from_several_hosts_stores_each_call_once(self, hosts: list[Store]) -> None:
        """All hosts add the same calls and open their sessions."""

        async def add(host: Store, number: int) -> bool:
            try:
                call = make_call(f"c{number}", f"s{number}", tools=(CALCULATOR,))
                await host.add_calls([call], new_session=make_session(f"s{number}"))
            except ConflictError:
                return False
            return True

        results = await asyncio.gather(*(add(host, number) for number in range(20) for host in hosts))
        assert sum(results) == 20
        assert [row.call_count for row in await hosts[0].sessions(RUN_ID)] == [1] * 20
