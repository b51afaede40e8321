"""Scores a session or a group with one scorer, with a time limit, retries and a fallback."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from instar.async_utils import run_with_timeout
from instar.config import ScoringConfig
from instar.errors import EngineUnavailable, InstarError, ScoreError, StoreError
from instar.http.retry import RetryPolicy
from instar.rewards.base import (
    GroupScorer,
    RolloutScoring,
    Scorer,
    ScoringContext,
    ScoringResult,
    Transcript,
    describe_error,
)
from instar.types import Reward, RewardSource, Score, ScoreState, Task

logger = logging.getLogger(__name__)

RETRY = RetryPolicy(first_delay=0.25, max_delay=30.0, jitter=(1.0, 1.5))
MAX_REQUESTED_DELAY_SECONDS = 300.0
CANCEL_GRACE_SECONDS = 2.0

LoadTranscripts = Callable[[], Awaitable[Sequence[Transcript]]]
"""Loads the sessions. Called again for each attempt, so that they do not stay in memory between attempts."""
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
    """Score sessions, with retries. If the last attempt fails, the scores contain the reason, and the rewards
    are the configured fallback, if any. Raises StoreError, but never an error from the scorer.
    ``memory_slot`` is held while the sessions are in memory, and ``attempt_slot`` during an attempt."""
    for attempt in range(1, config.retries + 2):
        try:
            async with memory_slot or nullcontext():
                transcripts = await load()
                async with attempt_slot or nullcontext(), scorer.concurrency_limit or nullcontext():
                    rewards = await _score_with_timeout(scorer, task, transcripts, config.deadline)
            normalized_rewards = _normalize_rewards(scorer, rewards, session_ids)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - a scorer is user code and may raise anything
            reason = describe_error(error)
            is_retryable = not isinstance(error, InstarError) or isinstance(error, EngineUnavailable)
            requested_delay = 0.0
            if isinstance(error, ScoreError):
                is_retryable, requested_delay = error.retryable, error.retry_after or 0.0
            logger.info("scorer %s failed on %s, attempt %d: %s", scorer.key, session_ids[0], attempt, reason)
            if attempt > config.retries or not is_retryable:
                return _give_up(scorer, session_ids, attempt, reason, config.fallback)
            await asyncio.sleep(
                RETRY.delay(attempt - 1, at_least=min(requested_delay, MAX_REQUESTED_DELAY_SECONDS))
            )
        else:
            scores = tuple(
                Score(session_id, scorer.key, ScoreState.SCORED, attempt) for session_id in session_ids
            )
            return ScoringResult(scores, normalized_rewards)
    raise AssertionError("unreachable")


async def _score_with_timeout(
    scorer: Scorer, task: Task, transcripts: Sequence[Transcript], timeout: float
) -> list[Reward]:
    if isinstance(scorer, GroupScorer):
        attempt = scorer.score_group(task, transcripts)
    else:
        (transcript,) = transcripts
        attempt = scorer.score(task, transcript)
    return await run_with_timeout(
        timeout,
        attempt,
        grace_seconds=CANCEL_GRACE_SECONDS,
        timeout_error=ScoreError(f"the scorer did not finish within {timeout:g} s", retryable=True),
        cancel_error=ScoreError("the scorer cancelled itself", retryable=True),
    )


def _normalize_rewards(
    scorer: Scorer, rewards: Sequence[Reward], session_ids: Sequence[str]
) -> tuple[Reward, ...]:
    """Fill in the scorer's name, its version and a reward id where they are missing. The store
    uses the id to ignore duplicates. Raises ScoreError if a reward is invalid."""
    normalized: list[Reward] = []
    key_counts: Counter[str] = Counter()
    for reward in rewards:
        if reward.session_id not in session_ids:
            raise ScoreError(
                f"the scorer returned a reward for {reward.session_id}, which it was not asked to score"
            )
        if not math.isfinite(reward.value):
            raise ScoreError(f"a reward must be a finite number, got {reward.value}")
        try:
            json.dumps(reward.detail)
        except (TypeError, ValueError) as error:
            raise ScoreError(f"a reward's detail cannot be encoded as JSON: {error}") from error
        key = "/".join([reward.session_id, scorer.key, *([reward.call_id] if reward.call_id else [])])
        key_counts[key] += 1
        normalized.append(
            replace(
                reward,
                scorer=reward.scorer or scorer.name,
                scorer_version=reward.scorer_version or scorer.version,
                reward_id=reward.reward_id or (key if key_counts[key] == 1 else f"{key}#{key_counts[key]}"),
            )
        )
    return tuple(normalized)


def _give_up(
    scorer: Scorer, session_ids: Sequence[str], attempts: int, reason: str, fallback: float | None
) -> ScoringResult:
    logger.warning("scorer %s gave up on %s, attempt %d: %s", scorer.key, session_ids[0], attempts, reason)
    scores = tuple(
        Score(session_id, scorer.key, ScoreState.FALLBACK, attempts, reason) for session_id in session_ids
    )
    if fallback is None:
        return ScoringResult(scores)
    rewards = [
        Reward(session_id, fallback, RewardSource.FALLBACK, scorer.name, detail={"reason": reason})
        for session_id in session_ids
    ]
    return ScoringResult(scores, _normalize_rewards(scorer, rewards, session_ids))


class InlineScoring(RolloutScoring):
    """Runs the scorers that rollouts wait for, one after the other."""

    def __init__(self, scorers: Sequence[Scorer], config: ScoringConfig) -> None:
        self.scorers = [scorer for scorer in scorers if not scorer.background]
        self.has_background_scorers = len(self.scorers) < len(scorers)
        self.config = config

    async def start(self, context: ScoringContext) -> None:
        for scorer in self.scorers:
            await scorer.start(context)

    async def close(self) -> None:
        for scorer in self.scorers:
            await scorer.close()

    async def score(self, task: Task, transcript: Transcript) -> ScoringResult:
        async def load() -> list[Transcript]:
            return [transcript]

        results = [
            await score_sessions(scorer, task, [transcript.session_id], load, self.config)
            for scorer in self.scorers
        ]
        return ScoringResult(
            tuple(score for result in results for score in result.scores),
            tuple(reward for result in results for reward in result.rewards),
        )
