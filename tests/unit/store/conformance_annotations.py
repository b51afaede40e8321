"""What is said of sessions: scores, tags, a judge's answers."""

from __future__ import annotations

import asyncio

import pytest

from instar.errors import StoreError
from instar.store.base import Run, Store
from instar.types import (
    Channel,
    GroupStatus,
    Reward,
    RewardSource,
    Score,
    ScoreState,
    SessionStatus,
    Tag,
)

from .factories import POLICY, RUN, make_group, make_session

KEY = "judge:outcome@1"
EVERYWHERE = (Channel.TRAIN, Channel.VAL, Channel.LIVE)


def scored(session: str, scorer: str = KEY, **changes: object) -> Score:
    return Score(session, scorer, ScoreState.SCORED, **changes)  # type: ignore[arg-type]


def reward(session: str, value: float = 1.0, reward_id: str | None = None) -> Reward:
    return Reward(session, value, RewardSource.JUDGE, "judge:outcome", reward_id=reward_id)


async def complete(store: Store, *names: str, channel: Channel = Channel.LIVE) -> None:
    for name in names:
        await store.open_session(make_session(name, channel=channel))
        await store.end_session(name, SessionStatus.COMPLETED)


async def found(store: Store, scorer: str = KEY, **options: object) -> list[str]:
    rows = await store.unscored_sessions(RUN, scorer, EVERYWHERE, **options)  # type: ignore[arg-type]
    return [row.session.session_id for row in rows]


class Scores:
    async def test_a_session_ends_with_its_scores(self, store: Store) -> None:
        await store.open_session(make_session("s"))
        gave_up = Score("s", "math", ScoreState.FALLBACK, 4, "no answer", 7.0)
        given = [reward("s", reward_id="r")]
        assert await store.end_session("s", SessionStatus.COMPLETED, None, given, None, [gave_up])
        assert not await store.end_session("s", SessionStatus.COMPLETED, None, given, None, [scored("s")])
        assert await store.scores(["s"]) == {"s": [gave_up]}
        assert len(await store.rewards("s")) == 1

    async def test_a_session_is_scored_once_by_a_scorer(self, store: Store) -> None:
        await complete(store, "a", "b")
        assert await store.record_scores([scored("a")], [reward("a")])
        assert not await store.record_scores([scored("b"), scored("a")], [reward("a"), reward("b")])
        assert await store.record_scores([scored("a", "judge:outcome@2")], [reward("a", 0.5)])
        assert [r.value for r in await store.rewards("a")] == [1.0, 0.5]
        assert await store.rewards("b") == [], "all or none"
        assert [s.scorer for s in (await store.scores(["a", "b"]))["a"]] == [KEY, "judge:outcome@2"]

    async def test_of_many_who_score_a_session_at_once_one_does(self, store: Store) -> None:
        await complete(store, "a")
        done = await asyncio.gather(
            *(store.record_scores([scored("a")], [reward("a", float(n))]) for n in range(8)),
            return_exceptions=True,
        )
        assert sum(each is True for each in done) == 1
        assert len(await store.rewards("a")) == 1

    async def test_a_reward_with_an_id_is_given_once(self, store: Store) -> None:
        await complete(store, "a")
        await store.add_rewards([reward("a", 1.0, "r")])
        await store.add_rewards([reward("a", 2.0, "r"), reward("a", 3.0)])
        assert [r.value for r in await store.rewards("a")] == [1.0, 3.0]

    async def test_nothing_is_said_of_a_session_that_is_not_there(self, store: Store) -> None:
        with pytest.raises(StoreError, match="no session nobody"):
            await store.record_scores([scored("nobody")], [])
        with pytest.raises(StoreError, match="no session nobody"):
            await store.add_tags([Tag("nobody", "good")])

    async def test_what_is_still_to_be_scored(self, store: Store) -> None:
        await complete(store, "a", "b", "c")
        await complete(store, "val", channel=Channel.VAL)
        await store.open_session(make_session("open"))
        await store.open_session(make_session("failed"))
        await store.end_session("failed", SessionStatus.FAILED)
        assert await found(store) == ["a", "b", "c", "val"]
        assert await found(store, limit=2) == ["a", "b"]
        rows = await store.unscored_sessions(RUN, KEY, [Channel.LIVE])
        assert [row.session.session_id for row in rows] == ["a", "b", "c"]
        assert await found(store, after=rows[0].seq) == ["b", "c", "val"]
        await store.record_scores([scored("b")], [])
        assert await found(store) == ["a", "c", "val"]
        assert await found(store, "judge:outcome@2") == ["a", "b", "c", "val"]
        assert await found(store, "judge:outcome@2", pending_only=True) == ["a", "c", "val"]
        assert await found(store, "judge:out@1", pending_only=True) == ["a", "b", "c", "val"]
        assert await store.unscored_sessions("other", KEY, EVERYWHERE) == []

    async def test_only_groups_that_wait_have_their_sessions_scored(self, store: Store) -> None:
        for place, status in enumerate(GroupStatus):
            await store.open_group(make_group(status.value, place, status=status))
            await store.open_session(make_session(f"of-{status.value}", group_id=status.value))
            await store.end_session(f"of-{status.value}", SessionStatus.COMPLETED)
        assert await found(store, pending_only=True) == ["of-open", "of-scoring"]
        assert len(await found(store)) == len(GroupStatus)

    async def test_up_to_where_every_session_has_ended(self, store: Store) -> None:
        assert await store.last_ended_seq(RUN, EVERYWHERE) == 0
        await complete(store, "a", "b")
        last = (await store.unscored_sessions(RUN, KEY, EVERYWHERE))[-1].seq
        assert await store.last_ended_seq(RUN, EVERYWHERE) == last
        await store.open_session(make_session("open", channel=Channel.VAL))
        await complete(store, "c")
        assert await store.last_ended_seq(RUN, EVERYWHERE) == last
        assert await store.last_ended_seq(RUN, [Channel.LIVE]) > last
        await store.end_session("open", SessionStatus.ABANDONED)
        assert await store.last_ended_seq(RUN, EVERYWHERE) > last

    async def test_scores_are_counted(self, store: Store) -> None:
        await complete(store, "a", "b")
        await store.record_scores([scored("a"), scored("a", "math")], [])
        await store.record_scores([Score("b", KEY, ScoreState.FALLBACK, 2, "late")], [])
        assert await store.score_counts(RUN) == {KEY: {"fallback": 1, "scored": 1}, "math": {"scored": 1}}
        assert await store.score_counts("other") == {}

    async def test_a_group_that_is_scored_is_under_way(self, store: Store) -> None:
        await store.put_run(Run(RUN, POLICY, {}))
        await store.open_group(make_group("g"))
        await store.close_group("g", GroupStatus.SCORING)
        progress = await store.progress(RUN)
        assert (progress.groups_open, progress.groups_ready) == (1, 0)
        assert await store.groups(RUN, Channel.TRAIN, GroupStatus.READY) == []
        group = await store.group("g")
        assert group is not None
        assert group.status is GroupStatus.SCORING
        assert await store.group("nobody") is None
        await store.close_group("g", GroupStatus.READY)
        assert (await store.progress(RUN)).groups_ready == 1


class TagsAndJudgments:
    async def test_a_tag_is_one_per_name(self, store: Store) -> None:
        await complete(store, "a", "b")
        await store.add_tags([Tag("a", "quality", "low", "short", "me", 1.0), Tag("a", "kept")])
        await store.add_tags([Tag("a", "quality", "high", "long", "you", 2.0), Tag("b", "quality", "low")])
        tags = await store.tags(["a", "b", "c"])
        assert [tag.name for tag in tags["a"]] == ["kept", "quality"]
        assert tags["a"][1] == Tag("a", "quality", "high", "long", "you", 2.0)
        assert tags["c"] == []
        assert await store.remove_tags(["a", "b", "c"], "quality") == 2
        assert await store.remove_tags(["a"], "quality") == 0

    async def test_the_first_answer_to_a_question_stands(self, store: Store) -> None:
        assert await store.judgment(b"q") is None
        await store.put_judgment(b"q", RUN, {"score": 1}, 0.25)
        await store.put_judgment(b"q", RUN, {"score": 2}, 0.25)
        await store.put_judgment(b"other", RUN, {"score": 3}, 0.5)
        assert await store.judgment(b"q") == {"score": 1}
        assert await store.judgment_totals(RUN) == (2, 0.75)
        assert await store.judgment_totals("other") == (0, 0.0)


class Annotations(Scores, TagsAndJudgments):
    """All of it."""
