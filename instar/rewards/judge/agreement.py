"""Measures how reliable judges are: whether they agree with themselves and with the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import correlation
from typing import Any

from instar.store.base import Store
from instar.types import Reward, RewardSource


@dataclass(frozen=True, slots=True)
class JudgeAgreement:
    """How well one version of a judge agrees with itself and with the rules. None means no data."""

    judge: str
    reward_count: int
    mean_reward: float
    dollars: float
    vote_agreement: float | None
    """How well two votes on the same question agree: 1 minus the mean difference of their scores or, for
    votes without scores, the fraction of equal verdicts."""
    order_agreement: float | None
    """The fraction of votes on pairs that have the same result in both orders."""
    rule_sessions: int
    """The number of sessions with rewards from both this judge and a rule. The last rule reward counts."""
    rule_same_side: float | None
    """The fraction of ``rule_sessions`` in which the judge and the rule are on the same side of 0.5."""
    rule_correlation: float | None
    """The Pearson correlation between judge and rule. Also None if either always gives the same value."""


async def measure_run_agreement(store: Store, run_id: str, *, page_size: int = 500) -> list[JudgeAgreement]:
    """Measure every judge version in the run, sorted by name. Sessions are read in pages of ``page_size``."""
    tallies: dict[str, _Tally] = {}
    after = 0
    while rows := await store.sessions(run_id, after=after, limit=page_size):
        after = rows[-1].seq
        rewards = await store.rewards_by_session([row.session.session_id for row in rows])
        for session_rewards in rewards.values():
            _count_rewards(tallies, session_rewards)
    return [tally.to_agreement(name) for name, tally in sorted(tallies.items())]


def _count_rewards(tallies: dict[str, _Tally], rewards: Sequence[Reward]) -> None:
    rules = [r.value for r in rewards if r.source is RewardSource.RULE and r.call_id is None]
    session_values: dict[str, float] = {}
    for reward in rewards:
        if reward.source is not RewardSource.JUDGE:
            continue
        name = f"{reward.scorer}@{reward.scorer_version}"
        tallies.setdefault(name, _Tally()).add(reward)
        if reward.call_id is None:
            session_values[name] = reward.value
    for name, value in session_values.items() if rules else ():
        tallies[name].compared.append((value, rules[-1]))


@dataclass(slots=True)
class _Tally:
    reward_count: int = 0
    reward_sum: float = 0.0
    dollars: float = 0.0
    vote_pairs: int = 0
    vote_agreement_sum: float = 0.0
    order_count: int = 0
    agreed_orders: int = 0
    compared: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """The judge's reward and a rule's reward for each session that has both."""

    def add(self, reward: Reward) -> None:
        self.reward_count += 1
        self.reward_sum += reward.value
        self.dollars += reward.cost
        votes: list[Any] = reward.detail.get("votes", [])
        for a, b in combinations(votes, 2):
            self.vote_pairs += 1
            self.vote_agreement_sum += float(a == b) if isinstance(a, str) else 1 - abs(a - b)
        self.order_count += reward.detail.get("orders", 0)
        self.agreed_orders += reward.detail.get("orders_agreed", 0)

    def to_agreement(self, name: str) -> JudgeAgreement:
        same_side = [(judge >= 0.5) == (rule >= 0.5) for judge, rule in self.compared]
        return JudgeAgreement(
            judge=name,
            reward_count=self.reward_count,
            mean_reward=self.reward_sum / self.reward_count,
            dollars=self.dollars,
            vote_agreement=_divide(self.vote_agreement_sum, self.vote_pairs),
            order_agreement=_divide(self.agreed_orders, self.order_count),
            rule_sessions=len(same_side),
            rule_same_side=_divide(sum(same_side), len(same_side)),
            rule_correlation=_compute_correlation(self.compared),
        )


def _divide(total: float, count: int) -> float | None:
    return total / count if count else None


def _compute_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    columns = list(zip(*pairs, strict=True))
    if len(pairs) < 2 or any(max(values) - min(values) < 1e-12 for values in columns):
        return None
    return correlation(*columns)
