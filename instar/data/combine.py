"""What the rewards of a session, or of one of its calls, come to: `scoring.combine`."""

from __future__ import annotations

from collections.abc import Sequence

from instar.config import CombineConfig, RunConfig
from instar.types import Reward, RewardSource, Score, ScoreState


class RewardCombiner:
    def __init__(self, config: RunConfig) -> None:
        self.config = config.scoring.combine
        self.excludes_fallback = config.scoring.fallback is None
        self.counts_agent_rewards = any(section.type == "agent" for section in config.reward)

    def is_excluded(self, scores: Sequence[Score]) -> bool:
        """Whether a scorer gave up on the session, and that excludes_fallback it."""
        return self.excludes_fallback and any(
            score.state is ScoreState.FALLBACK for score in latest_scores(scores)
        )

    def __call__(self, rewards: Sequence[Reward], scores: Sequence[Score] = ()) -> float | None:
        """None for a session that nobody scored, or that is left out."""
        if self.is_excluded(scores):
            return None
        return combine_rewards(self.config, [r for r in self._counted(rewards) if r.call_id is None])

    def combine_calls(self, rewards: Sequence[Reward], scores: Sequence[Score] = ()) -> dict[str, float]:
        """What single calls were rewarded with."""
        if self.is_excluded(scores):
            return {}
        by_call: dict[str, list[Reward]] = {}
        for reward in self._counted(rewards):
            if reward.call_id is not None:
                by_call.setdefault(reward.call_id, []).append(reward)
        combined = {call_id: combine_rewards(self.config, given) for call_id, given in by_call.items()}
        return {call_id: value for call_id, value in combined.items() if value is not None}

    def _counted(self, rewards: Sequence[Reward]) -> list[Reward]:
        """The agent's own word does not stand in for a scorer that never saw the session."""
        return [r for r in rewards if self.counts_agent_rewards or r.source is not RewardSource.AGENT]


def combine_rewards(config: CombineConfig, rewards: Sequence[Reward]) -> float | None:
    """Of rewards for the same thing, in the order they were given."""
    rewards = _without_stand_ins(rewards)
    for name, least in config.veto.items():
        given = [reward.value for reward in rewards if _is_by(reward, name)]
        if given and given[-1] < least:
            return config.veto_value
    return _preferred(config.prefer, rewards) if config.how == "prefer" else _sum(config.weights, rewards)


def _without_stand_ins(rewards: Sequence[Reward]) -> list[Reward]:
    """Without the fallback of a scorer that has scored it all the same, before or since."""
    scored = {reward.scorer for reward in rewards if reward.source is not RewardSource.FALLBACK}
    return [r for r in rewards if r.source is not RewardSource.FALLBACK or r.scorer not in scored]


def latest_scores(scores: Sequence[Score]) -> list[Score]:
    """The last of each scorer: another version of it may have scored the session again."""
    by_name = {score.scorer.partition("@")[0]: score for score in sorted(scores, key=lambda s: s.created_at)}
    return list(by_name.values())


def _preferred(names: Sequence[str], rewards: Sequence[Reward]) -> float | None:
    for name in names:
        given = [reward.value for reward in rewards if _is_by(reward, name)]
        if given:
            return given[-1]
    return None


def _sum(weights: dict[str, float], rewards: Sequence[Reward]) -> float | None:
    """Over the last reward of each scorer, by the weight of its name, else of its source."""
    last = {(reward.source, reward.scorer): reward for reward in rewards}
    weighed = [
        weights.get(reward.scorer, weights.get(reward.source.value, 0.0)) * reward.value
        for reward in last.values()
        if reward.scorer in weights or reward.source.value in weights
    ]
    return sum(weighed) if weighed else None


def _is_by(reward: Reward, name: str) -> bool:
    return name in (reward.scorer, reward.source.value)
