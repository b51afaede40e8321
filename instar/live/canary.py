"""Moves versions between shadow, canary and serving by their live replies and rewards.

A canary serves randomly chosen sessions, so its rewards are compared with those of the serving version in
the same period: the sessions of the canary since its last comparison with the other sessions of that time.
Each comparison is a difference with a known range. The differences are tested with a bet on every one of
them: under the hypothesis that the mean is not negative, the capital of the bets exceeds ``1 / ALPHA`` with a
probability of at most ALPHA, however often it is looked at (Ville's inequality). A t-test would only be valid
once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import NamedTuple

from instar.config import RunConfig
from instar.errors import ConflictError
from instar.live.base import StageCheck, StageOutcome
from instar.store.base import PolicyVersion, Store
from instar.types import Message, PolicyStage, Reward, RewardSource, Score, Session

CombineRewards = Callable[[Sequence[Reward], Sequence[Score]], float | None]

ALPHA = 0.05
"""The probability of rejecting a version, or rolling it back, that is as good as the one before it."""
BET_FRACTIONS = tuple(number / 10 for number in range(1, 10))
"""The shares of the capital that are bet. The capital is the mean over all of them."""
MAX_SESSIONS = 200
"""The number of sessions before a promotion or a canary, and after a promotion, that are compared."""
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reward of a session."""

    ended_at: float
    reward: float


class Rollback(NamedTuple):
    version: int
    """The version that was replaced."""
    previous: int
    """The version whose weights serve again."""
    reason: str


def compute_evidence(differences: Sequence[float], scale: float) -> float:
    """Return the capital of bets that the mean of the differences, which lie within ±``scale``, is negative.
    It is an e-process, so it may be compared with a threshold after every difference."""
    capitals = [
        math.exp(min(700.0, sum(math.log1p(-fraction * value / scale) for value in differences)))
        for fraction in BET_FRACTIONS
    ]
    return fmean(capitals)


def choose_range(earlier: Sequence[float], limits: tuple[float, float]) -> tuple[float, float]:
    """Return the range in which rewards are compared; rewards outside it are moved to its ends. It is the
    range of the earlier rewards, because a wider one makes comparisons weaker, or ``limits`` without them."""
    low, high = (min(earlier), max(earlier)) if earlier else limits
    return (low, high) if high > low else limits


def clip(outcomes: Sequence[Outcome], limits: tuple[float, float]) -> list[Outcome]:
    low, high = limits
    return [replace(outcome, reward=min(high, max(low, outcome.reward))) for outcome in outcomes]


def compare_by_time(canary: Sequence[Outcome], others: Sequence[Outcome]) -> list[float]:
    """Return the differences between the canary's rewards and the others of the same time. Each reward is
    part of at most one difference. A canary's session waits for a session of the other version after the
    previous difference, and several that wait are averaged."""
    remaining = sorted(others, key=lambda outcome: outcome.ended_at)
    differences: list[float] = []
    waiting: list[float] = []
    for outcome in sorted(canary, key=lambda outcome: outcome.ended_at):
        waiting.append(outcome.reward)
        block = [other.reward for other in remaining if other.ended_at <= outcome.ended_at]
        if block:
            remaining = remaining[len(block) :]
            differences.append(fmean(waiting) - fmean(block))
            waiting.clear()
    return differences


def is_lower(canary: Sequence[Outcome], others: Sequence[Outcome], limits: tuple[float, float]) -> bool:
    """Return True if the canary's mean reward is lower by more than one standard error."""
    if not canary or not others:
        return False
    largest_variance = ((limits[1] - limits[0]) / 2) ** 2
    error = 0.0
    for outcomes in (canary, others):
        rewards = [outcome.reward for outcome in outcomes]
        error += (variance(rewards) if len(rewards) > 1 else largest_variance) / len(rewards)
    difference = fmean(o.reward for o in canary) - fmean(o.reward for o in others)
    return difference < -math.sqrt(error)


def is_broken(reply: Message, finish_reason: str) -> bool:
    """Return True if a reply is empty or did not end."""
    is_empty = not reply["content"].strip() and not reply.get("tool_calls")
    return is_empty or finish_reason in ("length", "aborted")


class CanaryController:
    """Decides about the shadow, canary and newly promoted version of one policy. ``combine`` combines the
    rewards of a session, or of one of its calls. ``clock`` returns the Unix time."""

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        policy_id: str,
        combine: CombineRewards,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._run_id = config.name
        self._config = config.live.canary
        self._reward_range = config.gateway.reward_range
        self._policy_id = policy_id
        self._combine = combine
        self._clock = clock

    async def check_stage(self, policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
        """Decide about a version in the stage `shadow` or `canary`, as a `StageCheck`."""
        rows = await self._store.policy_versions(policy_id)
        row = next(row for row in rows if row.policy.version == version)
        return await (self._check_canary(row) if stage is PolicyStage.CANARY else self._check_shadow(row))

    async def check_serving(self) -> Rollback | None:
        """If live rewards fell after the last promotion, serve the version before it again, and return what
        was done."""
        rows = await self._store.policy_versions(self._policy_id)
        head = (await self._store.latest_policy(self._policy_id)).version
        serving = next((row for row in rows if row.policy.version == head), None)
        reason = None if serving is None else await self._find_fall(serving, rows)
        if reason is None:
            return None
        previous = find_previous(rows, head)
        try:
            await self._store.roll_back(self._policy_id, self._run_id, previous, reason, serving=head)
        except ConflictError:  # another version was promoted meanwhile
            return None
        return Rollback(head, previous, reason)

    async def _check_shadow(self, row: PolicyVersion) -> StageOutcome:
        pairs = await self._store.shadow_pairs(self._policy_id, row.policy.version)
        served = [is_broken(pair.served_reply, pair.served_finish_reason) for pair in pairs]
        shadow = [is_broken(pair.shadow.reply, pair.shadow.finish_reason) for pair in pairs]
        differences = [float(a) - float(b) for a, b in zip(served, shadow, strict=True)]
        counts = f"{sum(shadow)} of {len(pairs)} shadow replies are empty or did not end"
        if compute_evidence(differences, 1.0) >= 1 / ALPHA:
            return StageOutcome("reject", f"{counts}, but only {sum(served)} of the served replies")
        if len(pairs) >= self._config.shadow_replies or self._is_older(row, self._config.shadow_days):
            return StageOutcome("advance", counts)
        return StageOutcome("wait", counts)

    async def _check_canary(self, row: PolicyVersion) -> StageOutcome:
        version, since = row.policy.version, row.updated_at
        earlier = (await self._load(0.0, since))[-MAX_SESSIONS:]
        sessions = await self._list_sessions(since, None)
        limits = choose_range([outcome.reward for outcome in earlier], self._reward_range)
        canary = clip(await self._load_outcomes([s for s in sessions if s.canary_version == version]), limits)
        others = clip(await self._load_outcomes([s for s in sessions if s.canary_version is None]), limits)
        reason = f"{_describe(canary)}, compared with {_describe(others)} at the same time"
        if compute_evidence(compare_by_time(canary, others), limits[1] - limits[0]) >= 1 / ALPHA:
            return StageOutcome("reject", f"lower live rewards: {reason}")
        is_overdue = self._is_older(row, self._config.days)
        has_sessions = len(canary) >= self._config.sessions and len(others) > 0
        if not is_overdue and not has_sessions:
            return StageOutcome("wait", reason)
        if not is_lower(canary, others, limits):
            return StageOutcome("advance", reason)
        return StageOutcome("reject" if is_overdue else "wait", f"lower live rewards: {reason}")

    async def _find_fall(self, row: PolicyVersion, rows: Sequence[PolicyVersion]) -> str | None:
        """Compare the sessions since a promotion with those before it. Return a description of the fall of
        their rewards, or None if they did not fall."""
        if row.promoted_at is None or _is_rollback(row, rows):
            return None
        if self._clock() > row.promoted_at + self._config.rollback_days * SECONDS_PER_DAY:
            return None
        version = row.policy.version
        before = await self._load(_get_promotion(rows, find_previous(rows, version)), row.promoted_at)
        before = before[-MAX_SESSIONS:]
        # Always the first ones, so that no pair changes later: the evidence is only valid for a growing list.
        after = (await self._load(row.promoted_at, None))[:MAX_SESSIONS]
        limits = choose_range([outcome.reward for outcome in before], self._reward_range)
        before, after = clip(before, limits), clip(after, limits)
        # The last session before the promotion is compared with the first one after it, and so on.
        pairs = zip(after, reversed(before), strict=False)
        differences = [new.reward - old.reward for new, old in pairs]
        if compute_evidence(differences, limits[1] - limits[0]) < 1 / ALPHA:
            return None
        reason = f"live rewards fell after the promotion of version {version}: "
        return reason + f"{_describe(after)}, before it {_describe(before)}"

    def _is_older(self, row: PolicyVersion, days: float) -> bool:
        return self._clock() - row.updated_at >= days * SECONDS_PER_DAY

    async def _list_sessions(self, since: float, until: float | None) -> list[Session]:
        return await self._store.completed_live_sessions(self._run_id, self._policy_id, since, until=until)

    async def _load(self, since: float, until: float | None) -> list[Outcome]:
        """Return the outcomes of the sessions that no canary served."""
        sessions = await self._list_sessions(since, until)
        return await self._load_outcomes([s for s in sessions if s.canary_version is None])

    async def _load_outcomes(self, sessions: Sequence[Session]) -> list[Outcome]:
        """Return the outcomes of the sessions that have a reward, in the order in which they ended."""
        ids = [session.session_id for session in sessions]
        rewards, scores = await self._store.rewards_by_session(ids), await self._store.scores(ids)
        outcomes: list[Outcome] = []
        for session in sessions:
            reward = self._combine_session(rewards[session.session_id], scores[session.session_id])
            if reward is not None:
                outcomes.append(Outcome(session.ended_at or session.created_at, reward))
        return sorted(outcomes, key=lambda outcome: outcome.ended_at)

    def _combine_session(self, rewards: Sequence[Reward], scores: Sequence[Score]) -> float | None:
        """Return the reward of a session, or else the mean of the rewards of its calls."""
        known = [reward for reward in rewards if reward.source is not RewardSource.FALLBACK]
        if (value := self._combine([r for r in known if r.call_id is None], scores)) is not None:
            return value
        by_call: dict[str, list[Reward]] = {}
        for reward in known:
            if reward.call_id is not None:
                by_call.setdefault(reward.call_id, []).append(replace(reward, call_id=None))
        combined = [self._combine(calls, scores) for calls in by_call.values()]
        values = [value for value in combined if value is not None]
        return fmean(values) if values else None


def repeat_waits(check: StageCheck, seconds: float) -> StageCheck:
    """Return a check that repeats the answer `wait` for some seconds, because every check reads many
    sessions."""
    answers: dict[tuple[str, int, PolicyStage], tuple[float, StageOutcome]] = {}

    async def check_stage(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
        key = (policy_id, version, stage)
        if key not in answers or time.monotonic() - answers[key][0] >= seconds:
            answers[key] = time.monotonic(), await check(*key)
        return answers[key][1]

    return check_stage


def find_previous(rows: Sequence[PolicyVersion], version: int) -> int:
    """Return the version that was served before ``version``."""
    served = [row.policy.version for row in rows if row.promoted_at and row.policy.version < version]
    return max(served, default=0)


def _get_promotion(rows: Sequence[PolicyVersion], version: int) -> float:
    return next((row.promoted_at or 0.0 for row in rows if row.policy.version == version), 0.0)


def _is_rollback(row: PolicyVersion, rows: Sequence[PolicyVersion]) -> bool:
    """Return True if the version has the weights of its parent, as only a rollback publishes them again."""
    parent_step = next((other.step for other in rows if other.policy.version == row.parent), 0)
    return row.step == parent_step


def _describe(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "no rewarded sessions"
    return f"a mean of {fmean(outcome.reward for outcome in outcomes):.3g} over {len(outcomes)} session(s)"
