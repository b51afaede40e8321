"""One session, or group of them, scored by one scorer: deadlines, further attempts, and what stands in the
end when none of them came to anything."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from instar import async_utils
from instar.config import ScoringConfig
from instar.errors import EngineUnavailable, InstarError, ScoreError, StoreError
from instar.rewards.base import GroupScorer, RolloutScoring, Scorer, ScoringContext, ScoringResult, Transcript
from instar.types import Reward, RewardSource, Score, ScoreState, Task

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
LONGEST_WAIT = 300.0
"""Seconds that a scorer may ask to be left alone."""
GRACE = 2.0
"""Seconds that an attempt has to end after it was cancelled; then it is left behind."""
REASON_KEPT = 1000

LoadTranscripts = Callable[[], Awaitable[Sequence[Transcript]]]
"""Reads the sessions, for every attempt anew: while one waits for the next, nothing is held."""
AsyncSlot = AbstractAsyncContextManager[Any]


async def score_sessions(
    scorer: Scorer,
    task: Task,
    session_ids: Sequence[str],
    load: LoadTranscripts,
    config: ScoringConfig,
    *,
    memory_slot: AsyncSlot | None = None,
    attempt_slot: AsyncSlot | None = None,
) -> ScoringResult:
    """Try until it is scored, or given up. ``at_hand`` is held while the sessions are in memory, ``slot``
    during an attempt; neither between two of them. Raises StoreError, and nothing of the scorer's own."""
    for attempt in range(1, config.retries + 2):
        try:
            async with memory_slot or nullcontext():
                transcripts = await load()
                async with attempt_slot or nullcontext(), scorer.concurrency_limit or nullcontext():
                    rewards = await _within(config.deadline, _score(scorer, task, transcripts))
            checked = _checked(scorer, rewards, session_ids)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - a scorer is foreign code: what it raises is its failure
            reason = _describe(error)
            log.info("%s failed on %s, attempt %d: %s", scorer.key, session_ids[0], attempt, reason)
            if attempt > config.retries or not _may_pass(error):
                return _given_up(scorer, session_ids, attempt, reason, config.fallback)
            await asyncio.sleep(_pause(attempt - 1, error))
        else:
            scores = tuple(Score(each, scorer.key, ScoreState.SCORED, attempt) for each in session_ids)
            return ScoringResult(scores, checked)
    raise AssertionError("the last attempt returns")


async def _score(scorer: Scorer, task: Task, transcripts: Sequence[Transcript]) -> list[Reward]:
    if isinstance(scorer, GroupScorer):
        return await scorer.score_group(task, transcripts)
    (transcript,) = transcripts
    return await scorer.score(task, transcript)


async def _within(seconds: float, work: Coroutine[Any, Any, list[Reward]]) -> list[Reward]:
    """Its result, or ScoreError after so many seconds. What does not end when cancelled is left behind."""
    return await async_utils.run_with_deadline(
        seconds,
        work,
        grace=GRACE,
        on_timeout=ScoreError(f"no answer within {seconds:g} s", retryable=True),
        on_cancel=ScoreError("the scorer cancelled itself", retryable=True),
    )


def _checked(scorer: Scorer, rewards: Sequence[Reward], session_ids: Sequence[str]) -> tuple[Reward, ...]:
    """With their provenance, and the id by which none is recorded twice."""
    found: list[Reward] = []
    seen: Counter[str] = Counter()
    for reward in rewards:
        if reward.session_id not in session_ids:
            raise ScoreError(f"it rewarded {reward.session_id}, which it was not asked about")
        if not math.isfinite(reward.value):
            raise ScoreError(f"it gave {reward.value} as a reward; a finite number is needed")
        try:
            json.dumps(reward.detail)
        except (TypeError, ValueError) as error:
            raise ScoreError(f"the detail of its reward is not JSON: {error}") from error
        key = _reward_id(scorer, reward)
        seen[key] += 1
        found.append(
            replace(
                reward,
                scorer=reward.scorer or scorer.name,
                scorer_version=reward.scorer_version or scorer.version,
                reward_id=reward.reward_id or (key if seen[key] == 1 else f"{key}#{seen[key]}"),
            )
        )
    return tuple(found)


def _reward_id(scorer: Scorer, reward: Reward) -> str:
    return "/".join([reward.session_id, scorer.key, *([reward.call_id] if reward.call_id else [])])


def _given_up(
    scorer: Scorer, session_ids: Sequence[str], attempts: int, reason: str, value: float | None
) -> ScoringResult:
    log.warning("%s gave up on %s after %d attempts: %s", scorer.key, session_ids[0], attempts, reason)
    scores = tuple(Score(each, scorer.key, ScoreState.FALLBACK, attempts, reason) for each in session_ids)
    if value is None:
        return ScoringResult(scores)
    rewards = [
        Reward(each, value, RewardSource.FALLBACK, scorer.name, detail={"reason": reason})
        for each in session_ids
    ]
    return ScoringResult(scores, _checked(scorer, rewards, session_ids))


def _may_pass(error: Exception) -> bool:
    if isinstance(error, ScoreError):
        return error.retryable
    return not isinstance(error, InstarError) or isinstance(error, EngineUnavailable)


def _pause(failures: int, error: Exception) -> float:
    """Doubling, with jitter, so that many do not come back at once; not sooner than the scorer asked."""
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**failures)
    asked = error.retry_after if isinstance(error, ScoreError) and error.retry_after else 0.0
    return (max(pause, min(asked, LONGEST_WAIT))) * random.uniform(1.0, 1.5)


def _describe(error: Exception) -> str:
    """Our own errors say it all; others need their name."""
    text = str(error) if isinstance(error, InstarError) else f"{type(error).__name__}: {error}"
    return text.strip()[:REASON_KEPT]


class InlineScoring(RolloutScoring):
    """The scorers that a rollout waits for, one after another."""

    def __init__(self, scorers: Sequence[Scorer], config: ScoringConfig) -> None:
        self.scorers = [scorer for scorer in scorers if not scorer.background]
        self.has_background_scorers = len(self.scorers) < len(scorers)
        self.config = config

    async def start(self, context: ScoringContext) -> None:
        """Before the first session. Raises ConfigError."""
        for scorer in self.scorers:
            await scorer.start(context)

    async def close(self) -> None:
        for scorer in self.scorers:
            await scorer.close()

    async def score(self, task: Task, transcript: Transcript) -> ScoringResult:
        async def load() -> list[Transcript]:
            return [transcript]

        verdicts = [
            await score_sessions(scorer, task, [transcript.session_id], load, self.config)
            for scorer in self.scorers
        ]
        return ScoringResult(
            tuple(score for verdict in verdicts for score in verdict.scores),
            tuple(reward for verdict in verdicts for reward in verdict.rewards),
        )
