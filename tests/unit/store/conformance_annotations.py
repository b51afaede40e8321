"""Conformance tests for rewards, scores, tags and judgments, and for sessions and groups to be scored."""

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

from .factories import POLICY_ID, RUN_ID, make_group, make_session

SCORER = "judge:outcome@1"
CHANNELS = (Channel.TRAIN, Channel.VAL, Channel.LIVE)


def make_score(session_id: str, scorer: str = SCORER, **overrides: object) -> Score:
    return Score(session_id, scorer, ScoreState.SCORED, **overrides)  # type: ignore[arg-type]


def make_reward(session_id: str, value: float = 1.0, reward_id: str | None = None) -> Reward:
    return Reward(session_id, value, RewardSource.JUDGE, "judge:outcome", reward_id=reward_id)


async def complete_sessions(store: Store, *session_ids: str, channel: Channel = Channel.LIVE) -> None:
    for session_id in session_ids:
        await store.open_session(make_session(session_id, channel=channel))
        await store.end_session(session_id, SessionStatus.COMPLETED)


async def list_unscored(store: Store, scorer: str = SCORER, **options: object) -> list[str]:
    rows = await store.unscored_sessions(RUN_ID, scorer, CHANNELS, **options)  # type: ignore[arg-type]
    return [row.session.session_id for row in rows]


class ScoreTests:
    async def test_end_session_with_scores_stores_them_once(self, store: Store) -> None:
        await store.open_session(make_session("s"))
        fallback_score = Score("s", "math", ScoreState.FALLBACK, 4, "no answer", 7.0)
        rewards = [make_reward("s", reward_id="r")]
        assert await store.end_session("s", SessionStatus.COMPLETED, None, rewards, None, [fallback_score])
        assert not await store.end_session(
            "s", SessionStatus.COMPLETED, None, rewards, None, [make_score("s")]
        )
        assert await store.scores(["s"]) == {"s": [fallback_score]}
        assert len(await store.rewards("s")) == 1

    async def test_record_scores_of_a_scored_session_stores_none(self, store: Store) -> None:
        await complete_sessions(store, "a", "b")
        assert await store.record_scores([make_score("a")], [make_reward("a")])
        assert not await store.record_scores(
            [make_score("b"), make_score("a")], [make_reward("a"), make_reward("b")]
        )
        assert await store.record_scores([make_score("a", "judge:outcome@2")], [make_reward("a", 0.5)])
        assert [r.value for r in await store.rewards("a")] == [1.0, 0.5]
        assert await store.rewards("b") == [], "a rejected call must not store any reward"
        assert [s.scorer for s in (await store.scores(["a", "b"]))["a"]] == [SCORER, "judge:outcome@2"]

    async def test_record_scores_called_concurrently_succeeds_once(self, store: Store) -> None:
        await complete_sessions(store, "a")
        results = await asyncio.gather(
            *(store.record_scores([make_score("a")], [make_reward("a", float(n))]) for n in range(8)),
            return_exceptions=True,
        )
        assert sum(result is True for result in results) == 1
        assert len(await store.rewards("a")) == 1

    async def test_add_rewards_with_a_stored_id_adds_nothing(self, store: Store) -> None:
        await complete_sessions(store, "a")
        await store.add_rewards([make_reward("a", 1.0, "r")])
        await store.add_rewards([make_reward("a", 2.0, "r"), make_reward("a", 3.0)])
        assert [r.value for r in await store.rewards("a")] == [1.0, 3.0]

    async def test_scores_and_tags_of_an_unknown_session_raise(self, store: Store) -> None:
        with pytest.raises(StoreError, match="no session missing"):
            await store.record_scores([make_score("missing")], [])
        with pytest.raises(StoreError, match="no session missing"):
            await store.add_tags([Tag("missing", "good")])

    async def test_unscored_sessions_excludes_open_failed_and_scored_ones(self, store: Store) -> None:
        await complete_sessions(store, "a", "b", "c")
        await complete_sessions(store, "val", channel=Channel.VAL)
        await store.open_session(make_session("open"))
        await store.open_session(make_session("failed"))
        await store.end_session("failed", SessionStatus.FAILED)
        assert await list_unscored(store) == ["a", "b", "c", "val"]
        assert await list_unscored(store, limit=2) == ["a", "b"]
        rows = await store.unscored_sessions(RUN_ID, SCORER, [Channel.LIVE])
        assert [row.session.session_id for row in rows] == ["a", "b", "c"]
        assert await list_unscored(store, after=rows[0].seq) == ["b", "c", "val"]
        await store.record_scores([make_score("b")], [])
        assert await list_unscored(store) == ["a", "c", "val"]
        assert await list_unscored(store, "judge:outcome@2") == ["a", "b", "c", "val"]
        # With `pending_only`, a score by any version of "judge:outcome" counts, but not for "judge:out".
        assert await list_unscored(store, "judge:outcome@2", pending_only=True) == ["a", "c", "val"]
        assert await list_unscored(store, "judge:out@1", pending_only=True) == ["a", "b", "c", "val"]
        assert await store.unscored_sessions("other", SCORER, CHANNELS) == []

    async def test_unscored_sessions_pending_only_excludes_finished_groups(self, store: Store) -> None:
        for index, status in enumerate(GroupStatus):
            await store.open_group(make_group(status.value, index))
            await store.open_session(make_session(f"session-{status.value}", group_id=status.value))
            await store.end_session(f"session-{status.value}", SessionStatus.COMPLETED)
            await store.close_group(status.value, status)
        assert await list_unscored(store, pending_only=True) == ["session-open", "session-scoring"]
        assert len(await list_unscored(store)) == len(GroupStatus)

    async def test_seq_before_oldest_open_stops_before_the_first_open_session(self, store: Store) -> None:
        assert await store.seq_before_oldest_open(RUN_ID, CHANNELS) == 0
        await complete_sessions(store, "a", "b")
        last_seq = (await store.unscored_sessions(RUN_ID, SCORER, CHANNELS))[-1].seq
        assert await store.seq_before_oldest_open(RUN_ID, CHANNELS) == last_seq
        await store.open_session(make_session("open", channel=Channel.VAL))
        await complete_sessions(store, "c")
        assert await store.seq_before_oldest_open(RUN_ID, CHANNELS) == last_seq
        assert await store.seq_before_oldest_open(RUN_ID, [Channel.LIVE]) > last_seq
        await store.end_session("open", SessionStatus.ABANDONED)
        assert await store.seq_before_oldest_open(RUN_ID, CHANNELS) > last_seq

    async def test_score_counts_are_by_scorer_and_state(self, store: Store) -> None:
        await complete_sessions(store, "a", "b")
        await store.record_scores([make_score("a"), make_score("a", "math")], [])
        await store.record_scores([Score("b", SCORER, ScoreState.FALLBACK, 2, "late")], [])
        assert await store.score_counts(RUN_ID) == {
            SCORER: {"fallback": 1, "scored": 1},
            "math": {"scored": 1},
        }
        assert await store.score_counts("other") == {}

    async def test_reward_counts_are_by_source(self, store: Store) -> None:
        await complete_sessions(store, "a", "b")
        sources = (RewardSource.HUMAN, RewardSource.RULE, RewardSource.HUMAN)
        await store.open_session(make_session("copy", channel=Channel.RESAMPLED))
        await store.add_rewards([Reward("a", 1.0, source) for source in sources])
        await store.add_rewards([Reward("copy", 1.0, RewardSource.RULE)])
        assert await store.reward_counts(RUN_ID) == {"human": 2, "rule": 1}
        assert await store.reward_counts("other") == {}

    async def test_progress_counts_a_scoring_group_as_open(self, store: Store) -> None:
        await store.put_run(Run(RUN_ID, POLICY_ID, {}))
        await store.open_group(make_group("g"))
        await store.close_group("g", GroupStatus.SCORING)
        progress = await store.progress(RUN_ID)
        assert (progress.groups_open, progress.groups_ready) == (1, 0)
        assert await store.groups(RUN_ID, Channel.TRAIN, GroupStatus.READY) == []
        group = await store.group("g")
        assert group is not None
        assert group.status is GroupStatus.SCORING
        assert await store.group("missing") is None
        await store.close_group("g", GroupStatus.READY)
        assert (await store.progress(RUN_ID)).groups_ready == 1


class TagAndJudgmentTests:
    async def test_add_tags_with_the_same_name_replaces_the_tag(self, store: Store) -> None:
        await complete_sessions(store, "a", "b")
        await store.add_tags([Tag("a", "quality", "low", "short", "me", 1.0), Tag("a", "kept")])
        await store.add_tags([Tag("a", "quality", "high", "long", "you", 2.0), Tag("b", "quality", "low")])
        tags = await store.tags(["a", "b", "c"])
        assert [tag.name for tag in tags["a"]] == ["kept", "quality"]
        assert tags["a"][1] == Tag("a", "quality", "high", "long", "you", 2.0)
        assert tags["c"] == []
        assert await store.remove_tags(["a", "b", "c"], "quality") == 2
        assert await store.remove_tags(["a"], "quality") == 0

    async def test_put_judgment_again_keeps_the_first_answer(self, store: Store) -> None:
        assert await store.judgment(b"q") is None
        await store.put_judgment(b"q", RUN_ID, {"score": 1}, 0.25)
        await store.put_judgment(b"q", RUN_ID, {"score": 2}, 0.25)
        await store.put_judgment(b"other", RUN_ID, {"score": 3}, 0.5)
        assert await store.judgment(b"q") == {"score": 1}
        assert await store.judgment_totals(RUN_ID) == (2, 0.75)
        assert await store.judgment_totals("other") == (0, 0.0)


class AnnotationTests(ScoreTests, TagAndJudgmentTests):
    """All tests for annotations."""
