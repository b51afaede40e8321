"""Tests for the scoring runner with a real store, and with scorers that fail in various ways."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from instar.config import ScoringConfig
from instar.errors import ScoreError
from instar.rewards.base import JUDGE_AGENT, GroupScorer, Scorer, Transcript
from instar.rewards.runner import ScoringRunner
from instar.rewards.scoring import InlineScoring
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import (
    Channel,
    GroupStatus,
    Reward,
    RewardSource,
    ScoreState,
    SessionStatus,
    Task,
)
from tests.unit.store.factories import POLICY_ID, RUN_ID, make_call, make_group, make_session

QUICK_SCORING = ScoringConfig(deadline=0.3, retries=1, concurrency=4)


class FakeJudge(Scorer):
    """A fake judge that raises, hangs or returns rewards, depending on the session id."""

    name = "judge:test"
    version = "1"
    background = True

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.tasks: dict[str, Task] = {}
        self.running = 0
        self.max_running = 0

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        session = transcript.session_id
        self.attempts[session] += 1
        self.tasks[session] = task
        assert transcript.final_text == "hi"
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if "hangs" in session:
                await asyncio.sleep(60)
            await asyncio.sleep(0.002)
        finally:
            self.running -= 1
        if "fails" in session:
            raise ValueError("invalid")
        if "unretryable" in session:
            raise ScoreError("no budget")
        if "once" in session and self.attempts[session] == 1:
            raise ScoreError("busy", retryable=True, retry_after=0.01)
        return [
            Reward(session, 0.5, RewardSource.JUDGE, cost=0.01),
            Reward(session, 1.0, RewardSource.JUDGE, call_id=f"call-{session}"),
        ]


class PositionScorer(GroupScorer):
    """Rewards each session with its position in the group."""

    name = "position"

    async def score_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[Reward]:
        return [
            Reward(transcript.session_id, float(index), RewardSource.JUDGE)
            for index, transcript in enumerate(transcripts)
        ]


class FakeRule(FakeJudge):
    name = "rule"
    version = ""
    background = False


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    await store.put_run(Run(RUN_ID, POLICY_ID, {}))
    yield store
    await store.close()


async def add_session(
    store: SqliteStore, session_id: str, channel: Channel = Channel.LIVE, **fields: object
) -> None:
    await store.open_session(make_session(session_id, channel=channel, **fields))
    await store.add_calls([make_call(f"call-{session_id}", session_id)])
    await store.end_session(session_id, SessionStatus.COMPLETED)


def make_runner(store: SqliteStore, *scorers: Scorer, config: ScoringConfig = QUICK_SCORING) -> ScoringRunner:
    background = [scorer for scorer in scorers if scorer.background]
    return ScoringRunner(store, RUN_ID, background, config, agent_id="agent", live_scorers=scorers)


@asynccontextmanager
async def run_in_background(runner: ScoringRunner) -> AsyncIterator[None]:
    task = asyncio.create_task(runner.run())
    yield
    runner.drain()
    await asyncio.wait_for(task, 20)


async def wait_until_scored(store: SqliteStore, *session_ids: str, count: int = 1) -> None:
    async with asyncio.timeout(20):
        while any(len(scores) < count for scores in (await store.scores(session_ids)).values()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_every_session_is_scored_or_has_a_failure_reason(store: SqliteStore) -> None:
    session_ids = ["good", "once", "fails", "hangs", "unretryable"]
    for session_id in session_ids:
        await add_session(store, session_id)
    scorer = FakeJudge()
    async with run_in_background(make_runner(store, scorer)):
        await wait_until_scored(store, *session_ids)
    scores = {session_id: scores[0] for session_id, scores in (await store.scores(session_ids)).items()}
    assert {
        session_id: (score.state, score.attempts, score.reason) for session_id, score in scores.items()
    } == {
        "good": (ScoreState.SCORED, 1, None),
        "once": (ScoreState.SCORED, 2, None),
        "fails": (ScoreState.FALLBACK, 2, "ValueError: invalid"),
        "hangs": (ScoreState.FALLBACK, 2, "the scorer did not finish within 0.3 s"),
        "unretryable": (ScoreState.FALLBACK, 1, "no budget"),
    }
    session_reward, call_reward = await store.rewards("good")
    assert (session_reward.scorer, session_reward.scorer_version, session_reward.cost) == (
        "judge:test",
        "1",
        0.01,
    )
    assert session_reward.reward_id == "good/judge:test@1"
    assert call_reward.reward_id == "good/judge:test@1/call-good"
    assert await store.rewards("fails") == []


async def test_fallback_value_is_recorded_as_reward(store: SqliteStore) -> None:
    await add_session(store, "unretryable")
    config = QUICK_SCORING.model_copy(update={"fallback": -1.0})
    async with run_in_background(make_runner(store, FakeJudge(), config=config)):
        await wait_until_scored(store, "unretryable")
    (reward,) = await store.rewards("unretryable")
    assert (reward.value, reward.source, reward.scorer) == (-1.0, RewardSource.FALLBACK, "judge:test")
    assert reward.detail == {"reason": "no budget"}


async def test_every_session_is_scored_exactly_once(store: SqliteStore) -> None:
    """Sessions end in a different order than they were opened, and a second runner follows the first."""
    session_ids = [f"s{number}" for number in range(60)]
    for session_id in session_ids:
        await store.open_session(make_session(session_id, channel=Channel.LIVE))
        await store.add_calls([make_call(f"call-{session_id}", session_id)])
    scorer = FakeJudge()
    async with run_in_background(make_runner(store, scorer)):
        for session_id in reversed(session_ids[:30]):
            await store.end_session(session_id, SessionStatus.COMPLETED)
        await wait_until_scored(store, *session_ids[:30])
        for session_id in reversed(session_ids[30:45]):
            await store.end_session(session_id, SessionStatus.COMPLETED)
        await wait_until_scored(store, *session_ids[30:45])
    for session_id in session_ids[45:]:
        await store.end_session(session_id, SessionStatus.COMPLETED)
    async with run_in_background(make_runner(store, scorer)):
        await wait_until_scored(store, *session_ids)
    assert scorer.attempts == Counter(session_ids)
    assert 1 < scorer.max_running <= QUICK_SCORING.concurrency
    assert await store.score_counts(RUN_ID) == {"judge:test@1": {"scored": 60}}


async def test_session_deleted_while_it_is_scored_does_not_stop_the_runner(store: SqliteStore) -> None:
    class DeletingJudge(FakeJudge):
        async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
            if transcript.session_id == "deleted":
                await store.forget_sessions(RUN_ID, ["deleted"])
            return await super().score(task, transcript)

    for session_id in ("deleted", "kept"):
        await add_session(store, session_id)
    scorer = DeletingJudge()
    async with run_in_background(make_runner(store, scorer)):
        await wait_until_scored(store, "kept")
    assert scorer.attempts["deleted"] == 1
    assert await store.rewards("deleted") == []


async def test_hanging_scorer_delays_only_its_own_sessions(store: SqliteStore) -> None:
    class HangingJudge(FakeJudge):
        name = "hanging"

        async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
            await asyncio.sleep(60)
            return []

    session_ids = [f"s{number}" for number in range(20)]
    for session_id in session_ids:
        await add_session(store, session_id)
    long_deadline = QUICK_SCORING.model_copy(update={"deadline": 50.0})
    runner = make_runner(store, HangingJudge(), FakeJudge(), config=long_deadline)
    task = asyncio.create_task(runner.run())
    await wait_until_scored(store, *session_ids)
    assert "20 scored" in runner.status_text
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class SequentialJudge(FakeJudge):
    """Scores one session at a time, each in a third of the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.concurrency_limit = asyncio.Semaphore(1)

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        await asyncio.sleep(QUICK_SCORING.deadline / 3)
        return await super().score(task, transcript)


async def test_wait_for_concurrency_limit_does_not_count_towards_deadline(store: SqliteStore) -> None:
    session_ids = [f"s{number}" for number in range(6)]
    for session_id in session_ids:
        await add_session(store, session_id)
    scorer = SequentialJudge()
    async with run_in_background(make_runner(store, scorer)):
        await wait_until_scored(store, *session_ids)
    assert await store.score_counts(RUN_ID) == {"judge:test@1": {"scored": 6}}
    assert (scorer.attempts, scorer.max_running) == (Counter(session_ids), 1)


class SequentialRule(SequentialJudge):
    background = False


async def test_wait_for_concurrency_limit_does_not_count_in_rollouts(store: SqliteStore) -> None:
    await add_session(store, "s")
    transcript = Transcript("s", await store.calls("s"), None)
    scorer = SequentialRule()
    scoring = InlineScoring([scorer], QUICK_SCORING)
    results = await asyncio.gather(*(scoring.score(Task("t", {}), transcript) for _ in range(6)))
    assert {(score.state, score.attempts) for result in results for score in result.scores} == {
        (ScoreState.SCORED, 1)
    }
    assert scorer.max_running == 1


async def test_live_sessions_use_all_scorers_and_rollout_sessions_only_background_scorers(
    store: SqliteStore,
) -> None:
    await store.open_group(make_group("g", task=Task("t", {"q": 7})))
    await add_session(store, "trained", Channel.TRAIN, group_id="g")
    await add_session(store, "live", metadata={"task": {"q": 8}}, task_id="own")
    await add_session(store, "judge-session", agent_id=JUDGE_AGENT)
    judge, rule = FakeJudge(), FakeRule()
    async with run_in_background(make_runner(store, judge, rule)):
        await wait_until_scored(store, "trained")
        await wait_until_scored(store, "live", count=2)
    assert set(judge.attempts) == {"trained", "live"}
    assert set(rule.attempts) == {"live"}
    assert judge.tasks["trained"] == Task("t", {"q": 7})
    assert judge.tasks["live"] == Task("own", {"q": 8})


async def wait_until_ready(store: SqliteStore, group_id: str) -> None:
    async with asyncio.timeout(20):
        while (group := await store.group(group_id)) and group.status is not GroupStatus.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_group_is_ready_when_all_its_sessions_are_scored(store: SqliteStore) -> None:
    await store.open_group(make_group("g", size=3))
    await add_session(store, "a", Channel.TRAIN, group_id="g", slot=0)
    await add_session(store, "b-hangs", Channel.TRAIN, group_id="g", slot=1)
    await store.open_session(make_session("c", group_id="g", slot=2))
    await store.end_session("c", SessionStatus.FAILED, "test failure")
    async with run_in_background(make_runner(store, FakeJudge(), PositionScorer())):
        await wait_until_scored(store, "a")
        group = await store.group("g")
        assert group is not None
        assert group.status is GroupStatus.OPEN
        await store.close_group("g", GroupStatus.SCORING)
        await wait_until_ready(store, "g")
    scores = await store.scores(["a", "b-hangs", "c"])
    assert [len(scores[session_id]) for session_id in ("a", "b-hangs", "c")] == [2, 2, 0]
    values = {reward.scorer: reward.value for reward in await store.rewards("b-hangs")}
    assert values == {"position": 1.0}


async def test_group_without_completed_sessions_is_ready(store: SqliteStore) -> None:
    await store.open_group(make_group("g", size=1, status=GroupStatus.SCORING))
    async with run_in_background(make_runner(store, FakeJudge())):
        await wait_until_ready(store, "g")


async def test_new_scorer_version_skips_scored_sessions(store: SqliteStore) -> None:
    await add_session(store, "old")
    async with run_in_background(make_runner(store, FakeJudge())):
        await wait_until_scored(store, "old")

    class NewerJudge(FakeJudge):
        version = "2"

    scorer = NewerJudge()
    await add_session(store, "new")
    async with run_in_background(make_runner(store, scorer)):
        await wait_until_scored(store, "new")
    assert set(scorer.attempts) == {"new"}
