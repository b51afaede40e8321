"""Conformance tests for listing sessions: filters and pagination."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from instar.store.base import SessionFilter, Store
from instar.store.listing import MAX_START_SESSIONS
from instar.types import Channel, Message, Reward, RewardSource, SessionStatus, Tag

from .factories import RUN_ID, ids, make_call, make_claim, make_group, make_next_call, make_session, user


async def fill_store(store: Store) -> None:
    """Add sessions s0 to s9, created at 0.5 to 9.5. Even ones are completed, with their number as reward.

    Also add a session of another run, a judge's and a human's reward, and tags.
    """
    for number in range(10):
        channel = Channel.VAL if number == 9 else Channel.TRAIN
        session = make_session(f"s{number}", channel=channel, task_id=f"t{number % 3}")
        await store.open_session(replace(session, created_at=number + 0.5))
        if number % 2 == 0:
            reward = Reward(f"s{number}", float(number), RewardSource.RULE, scorer="math")
            await store.end_session(f"s{number}", SessionStatus.COMPLETED, rewards=[reward])
    await store.open_session(make_session("other", run_id="other-run", agent_id="other-agent"))
    judged = Reward("s2", -1.0, RewardSource.JUDGE, scorer="judge:outcome", scorer_version="2")
    await store.add_rewards([judged, Reward("s4", 9.0, RewardSource.HUMAN, call_id="c")])
    await store.add_tags(
        [Tag("s0", "quality", "good"), Tag("s1", "quality", "bad"), Tag("s1", "untrainable")]
    )


FILTERS: list[tuple[dict[str, Any], str]] = [
    ({}, "0123456789"),
    ({"channel": Channel.VAL}, "9"),
    ({"status": SessionStatus.COMPLETED}, "02468"),
    ({"status": SessionStatus.OPEN, "channel": Channel.TRAIN}, "1357"),
    ({"ids": ("s3", "s5", "other")}, "35"),
    ({"tags": (("quality", None),)}, "01"),
    ({"tags": (("quality", "good"),)}, "0"),
    ({"tags": (("quality", None), ("untrainable", None))}, "1"),
    ({"tags": (("quality", None),), "without": ("untrainable",)}, "0"),
    ({"without": ("quality",), "status": SessionStatus.COMPLETED}, "2468"),
    ({"reward_min": 6.0}, "68"),
    ({"reward_max": 0.0}, "02"),
    ({"reward_min": 1.0, "scorer": "math"}, "2468"),
    ({"source": RewardSource.JUDGE}, "2"),
    ({"source": RewardSource.JUDGE, "reward_min": 0.0}, ""),
    ({"scorer": "judge:outcome@2"}, "2"),
    ({"scorer": "judge:outcome@3"}, ""),
    ({"source": RewardSource.HUMAN}, "4"),
    ({"task": "t0"}, "0369"),
    ({"agent": "other-agent"}, ""),
    ({"since": 3.5, "until": 5.5}, "34"),
]
"""Filters, and the numbers of the sessions that match, one digit each."""


class ListingTests:
    @pytest.mark.parametrize(("fields", "expected"), FILTERS)
    async def test_filter_returns_the_same_sessions_in_pages(
        self, store: Store, fields: dict[str, Any], expected: str
    ) -> None:
        await fill_store(store)
        where = SessionFilter(**fields)
        session_ids = [row.session.session_id for row in await store.sessions(RUN_ID, where=where)]
        assert session_ids == [f"s{number}" for number in expected]
        pages: list[list[str]] = []
        before = None
        while page := await store.sessions(RUN_ID, where=where, before=before, limit=2):
            pages.insert(0, [row.session.session_id for row in page])
            before = page[0].seq
        assert [session_id for page in pages for session_id in page] == session_ids
        forward: list[str] = []
        after = 0
        while page := await store.sessions(RUN_ID, where=where, after=after, limit=2):
            forward += [row.session.session_id for row in page]
            after = page[-1].seq
        assert forward == session_ids

    async def test_session_row_has_the_latest_session_reward(self, store: Store) -> None:
        await fill_store(store)
        rewards = {row.session.session_id: row.reward for row in await store.sessions(RUN_ID)}
        assert (rewards["s2"], rewards["s4"], rewards["s1"]) == (-1.0, 4.0, None)

    async def test_sessions_with_a_common_tag_returns_the_newest(self, store: Store) -> None:
        session_ids = [f"s{number:05}" for number in range(MAX_START_SESSIONS + 5)]
        await asyncio.gather(*(store.open_session(make_session(session_id)) for session_id in session_ids))
        await store.add_tags([Tag(session_id, "seen") for session_id in session_ids[:-1]])
        (row,) = await store.sessions(RUN_ID, where=SessionFilter(tags=(("seen", None),)), limit=1)
        assert row.session.session_id == session_ids[-2]

    async def test_sessions_by_group_and_calls_by_session_return_each_key(self, store: Store) -> None:
        await store.open_session(make_session("a", group_id="g"))
        await store.open_session(make_session("b", group_id="g"))
        first = make_call("a1", "a")
        await store.add_calls(
            [first, make_call("b1", "b"), make_next_call(first, "a2", ids(9), user("go on"))]
        )
        sessions = await store.sessions_by_group(["g", "missing"])
        assert [session.session_id for session in sessions["g"]] == ["a", "b"]
        assert sessions["missing"] == []
        calls_by_session = await store.calls_by_session(["b", "a", "missing"])
        assert {key: [call.call_id for call in calls] for key, calls in calls_by_session.items()} == {
            "a": ["a1", "a2"],
            "b": ["b1"],
            "missing": [],
        }
        assert calls_by_session["a"][1].prompt_ids.tolist() == [*first.sequence.tolist(), 9]

    async def test_recent_claims_returns_the_latest_groups(self, store: Store) -> None:
        for index in range(3):
            await store.open_group(make_group(f"g{index}", index))
        claims = [
            make_claim(f"g{index}/0", group_id=f"g{index}", session_id=f"s{index}") for index in range(2)
        ]
        await store.claim_step(RUN_ID, 1, claims)
        assert [claim.group_id for claim in await store.recent_claims(RUN_ID, 0, 9)] == ["g0", "g1"]
        assert [claim.group_id for claim in await store.recent_claims(RUN_ID, 0, 1)] == ["g1"]
        assert await store.recent_claims(RUN_ID, 1, 9) == []

    async def test_first_messages_come_from_the_first_call_of_each_session(self, store: Store) -> None:
        for session_id in ("a", "b", "empty"):
            await store.open_session(make_session(session_id))
        system = Message(role="system", content="Be brief.")
        first = make_call("a1", "a", messages=(system, user("first"), user("second")))
        await store.add_calls([first, make_next_call(first, "a2", ids(9), user("third"))])
        await store.add_calls([make_call("b1", "b", messages=(system,))])
        assert await store.first_messages(["a", "b", "empty"], "user") == {"a": "first", "b": ""}
