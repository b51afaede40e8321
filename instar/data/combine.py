"""Combines the rewards of a session or call into one number, as configured in `scoring.combine`."""

from __future__ import annotations

from collections.abc import Sequence

from instar.config import CombineConfig, RunConfig
from instar.types import Reward, RewardSource, Score, ScoreState


class RewardCombiner:
    def __init__(self, config: RunConfig) -> None:
        self.config = config.scoring.combine
        self.has_fallback = config.scoring.fallback is not None
        self.counts_agent_rewards = any(section.type == "agent" for section in config.reward)

    def is_excluded(self, scores: Sequence[Score]) -> bool:
        """Return True if a scorer gave up on the session, and there is no fallback reward."""
        if self.has_fallback:
            return False
        # Several versions of a scorer may have scored the session. Only the latest score counts.
        ordered = sorted(scores, key=lambda score: score.created_at)
        latest = {score.scorer.partition("@")[0]: score for score in ordered}
        return any(score.state is ScoreState.FALLBACK for score in latest.values())

    def __call__(self, rewards: Sequence[Reward], scores: Sequence[Score] = ()) -> float | None:
        """Return the session's combined reward, or None if no reward counts or the session is excluded."""
        if self.is_excluded(scores):
            return None
        return combine_rewards(self.config, [r for r in self._select_counted(rewards) if r.call_id is None])

    def combine_calls(self, rewards: Sequence[Reward], scores: Sequence[Score] = ()) -> dict[str, float]:
        """Return the combined reward of each call by call id. Empty if the session is excluded."""
        if self.is_excluded(scores):
            return {}
        by_call: dict[str, list[Reward]] = {}
        for reward in self._select_counted(rewards):
            if reward.call_id is not None:
                by_call.setdefault(reward.call_id, []).append(reward)
        combined = {call_id: combine_rewards(self.config, values) for call_id, values in by_call.items()}
        return {call_id: value for call_id, value in combined.items() if value is not None}

    def _select_counted(self, rewards: Sequence[Reward]) -> list[Reward]:
        """Leave out the agent's own rewards, unless the config section `reward` lists the type ``agent``."""
        return [r for r in rewards if self.counts_agent_rewards or r.source is not RewardSource.AGENT]


def combine_rewards(config: CombineConfig, rewards: Sequence[Reward]) -> float | None:
    """Return the combined reward of a session or call, or None if no reward counts. If the last reward from a
    scorer or source in `veto` is too low, return `veto_value`. ``rewards`` must be ordered by time."""
    # A fallback does not count if its scorer also returned a score, earlier or later.
    scored = {reward.scorer for reward in rewards if reward.source is not RewardSource.FALLBACK}
    rewards = [r for r in rewards if r.source is not RewardSource.FALLBACK or r.scorer not in scored]
    for name, minimum in config.veto.items():
        values = [reward.value for reward in rewards if _is_from(reward, name)]
        if values and values[-1] < minimum:
            return config.veto_value
    if config.how == "prefer":
        preferred = ([r.value for r in rewards if _is_from(r, name)] for name in config.prefer)
        return next((values[-1] for values in preferred if values), None)
    return _compute_weighted_sum(config.weights, rewards)


def _compute_weighted_sum(weights: dict[str, float], rewards: Sequence[Reward]) -> float | None:
    """Sum each scorer's last reward, weighted by its name or else its source. None if none has a weight."""
    last_rewards = {(reward.source, reward.scorer): reward for reward in rewards}
    weighted = [
        weights.get(reward.scorer, weights.get(reward.source.value, 0.0)) * reward.value
        for reward in last_rewards.values()
        if reward.scorer in weights or reward.source.value in weights
    ]
    return sum(weighted) if weighted else None


def _is_from(reward: Reward, name: str) -> bool:
    return name in (reward.scorer, reward.source.value)
