"""What every store must do for processes that write at once: each store that is opened here has a writer of
its own, as another host would."""

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

from .factories import CALCULATOR, POLICY, RUN, dropped, make_call, make_claim, make_group, make_session

OpenStore = Callable[[], Store]
HOSTS = 3


class ManyHosts:
    @pytest.fixture
    async def hosts(self, open_store: OpenStore) -> AsyncIterator[list[Store]]:
        async with AsyncExitStack() as stack:
            stores = [open_store() for _ in range(HOSTS)]
            for store in stores:
                stack.push_async_callback(store.close)
            yield stores

    async def test_who_has_lost_the_lease_writes_nothing(self, hosts: list[Store]) -> None:
        driver, old, new = hosts
        await old.hold_lease(RUN, "trainer", await driver.take_lease(RUN, "trainer"))
        await old.claim_step(RUN, 1, [make_claim("k")])
        lease = await driver.take_lease(RUN, "trainer")
        with pytest.raises(LeaseLost, match="taken over the trainer of run 'run'"):
            await old.advance_step(RUN, 1, StepState.SUBMITTED)
        await new.hold_lease(RUN, "trainer", lease)
        assert await new.release_steps(RUN, 0) == [1]
        outcomes = await asyncio.gather(
            old.claim_step(RUN, 1, [make_claim("k")]),
            old.open_group(make_group("g")),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [LeaseLost, LeaseLost]
        assert await new.claims(RUN) == []
        assert await new.groups(RUN, Channel.TRAIN) == []
        with pytest.raises(LeaseLost):
            await driver.hold_lease(RUN, "trainer", lease - 1)
        await driver.open_group(make_group("g"))  # it acts for no role, and goes on
        await new.claim_step(RUN, 1, [make_claim("k")])
        assert await driver.take_lease(RUN, "gateway") == 1
        assert await driver.take_lease("another", "trainer") == 1

    async def test_a_sample_is_claimed_by_one(self, hosts: list[Store]) -> None:
        """Each host claims all groups in another order, four at a time, as steps of its own."""
        groups = [f"g{i}" for i in range(12)]
        for index, group in enumerate(groups):
            await hosts[0].open_group(make_group(group, index, status=GroupStatus.READY))

        async def claim(host: int) -> list[str]:
            order, won = groups[4 * host :] + groups[: 4 * host], list[str]()
            for start in range(0, 12, 2):
                mine = order[start : start + 2]
                try:
                    await hosts[host].claim_step(
                        RUN, 100 * host + start, [make_claim(f"k-{group}", group_id=group) for group in mine]
                    )
                    won += mine
                except ConflictError:
                    continue
            return won

        won = await asyncio.gather(*(claim(host) for host in range(HOSTS)))
        assert Counter(group for each in won for group in each) == Counter(groups)
        assert len(await hosts[0].claims(RUN)) == 12
        assert await hosts[0].groups(RUN, Channel.TRAIN, unclaimed_in_epoch=0) == []

    async def test_what_is_consumed_is_known_however_it_came_about(self, hosts: list[Store]) -> None:
        """One host drops a sample of each group while another claims and commits the others."""
        count = 12
        for index in range(count):
            await hosts[0].open_group(make_group(f"g{index}", index, status=GroupStatus.READY))

        async def drop(host: Store) -> None:
            for index in range(count):
                await host.drop_samples([dropped(f"d{index}", group_id=f"g{index}")])

        async def train(host: Store) -> None:
            for index in reversed(range(count)):
                await host.claim_step(RUN, index, [make_claim(f"k{index}", group_id=f"g{index}")])
                if index % 2 == 0:
                    await host.advance_step(RUN, index, StepState.COMMITTED)

        await asyncio.gather(drop(hosts[1]), train(hosts[2]))
        progress = await hosts[0].progress(RUN)
        assert (progress.groups_consumed, progress.groups_ready) == (count // 2, count // 2)
        assert progress.committed_steps == count // 2

    async def test_a_session_ends_once(self, hosts: list[Store]) -> None:
        names = [f"s{i}" for i in range(10)]
        for name in names:
            await hosts[0].open_session(make_session(name))

        async def end(host: Store, order: list[str]) -> int:
            ended = await asyncio.gather(
                *(
                    host.end_session(
                        name, SessionStatus.COMPLETED, rewards=[Reward(name, 1.0, RewardSource.RULE)]
                    )
                    for name in order
                )
            )
            return sum(ended)

        won = await asyncio.gather(*(end(host, names[:: 1 - 2 * (i % 2)]) for i, host in enumerate(hosts)))
        assert sum(won) == len(names)
        assert [len(await hosts[1].rewards(name)) for name in names] == [1] * len(names)
        assert (await hosts[2].progress(RUN)).sessions == {"completed": 10}

    async def test_counts_are_those_of_the_rows(self, hosts: list[Store]) -> None:
        """Sessions and groups opened and closed by all at once, in transactions of many."""

        async def work(host: int) -> None:
            store = hosts[host]
            sessions, groups = [f"s{host}-{i}" for i in range(20)], [f"g{host}-{i}" for i in range(20)]
            await asyncio.gather(
                *(store.open_session(make_session(name)) for name in sessions),
                *(store.open_group(make_group(name, i)) for i, name in enumerate(groups)),
            )
            other = hosts[(host + 1) % HOSTS]
            await asyncio.gather(
                *(other.close_group(name, GroupStatus.READY) for name in groups[::2]),
                *(other.end_session(name, SessionStatus.FAILED, "x") for name in sessions[::4]),
                *(store.close_group(name, GroupStatus.DROPPED, "x") for name in groups[1::4]),
            )

        await asyncio.gather(*(work(host) for host in range(HOSTS)))
        progress = await hosts[0].progress(RUN)
        assert progress.sessions == {"open": 15 * HOSTS, "failed": 5 * HOSTS}
        counted = (progress.groups_ready, progress.groups_consumed, progress.groups_open)
        assert counted == (10 * HOSTS, 5 * HOSTS, 5 * HOSTS)
        assert len(await hosts[0].sessions(RUN, status=SessionStatus.OPEN)) == 15 * HOSTS

    async def test_versions_are_never_used_twice(self, hosts: list[Store]) -> None:
        async def publish(host: Store) -> list[int]:
            mine: list[int] = []
            for step in range(6):
                version = await host.reserve_version(POLICY, RUN, step)
                mine.append(version)
                if step % 2:
                    await host.publish(Policy(POLICY, version, Artifact("base")))
                else:
                    await host.tombstone(POLICY, version, "given up")
            return mine

        numbers = await asyncio.gather(*(publish(host) for host in hosts))
        assert sorted(number for mine in numbers for number in mine) == list(range(1, 6 * HOSTS + 1))
        assert len(await hosts[0].published_policies(POLICY)) == 3 * HOSTS

    async def test_a_secret_is_made_once(self, hosts: list[Store]) -> None:
        made = await asyncio.gather(*(host.secret(name) for name in ("a", "b") for host in hosts * 2))
        assert len(set(made)) == 2

    async def test_what_was_read_stays_the_beginning(self, hosts: list[Store]) -> None:
        """Calls of one session, written by all: a later read adds to an earlier one, never in between."""
        await hosts[0].open_session(make_session())

        async def write(host: int) -> None:
            for turn in range(8):
                names = [f"{host}-{turn}-{i}" for i in range(4)]
                await asyncio.gather(
                    *(hosts[host].add_calls([make_call(name, tools=(CALCULATOR,))]) for name in names)
                )

        writing = asyncio.gather(*(write(host) for host in range(HOSTS)))
        seen: list[str] = []
        while not writing.done():
            now = [part.call_id for part in await hosts[0].call_deltas("s")]
            assert now[: len(seen)] == seen
            seen = now
        await writing
        assert len(await hosts[0].calls("s")) == 32 * HOSTS

    async def test_a_call_is_stored_by_one(self, hosts: list[Store]) -> None:
        """All add the same calls, with sessions that they open."""

        async def add(host: Store, number: int) -> bool:
            try:
                call = make_call(f"c{number}", f"s{number}", tools=(CALCULATOR,))
                await host.add_calls([call], opening=make_session(f"s{number}"))
            except ConflictError:
                return False
            return True

        won = await asyncio.gather(*(add(host, number) for number in range(20) for host in hosts))
        assert sum(won) == 20
        assert [row.calls for row in await hosts[0].sessions(RUN)] == [1] * 20
