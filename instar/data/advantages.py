"""Computes advantages from the rewards of a group.

A session without a reward has reward None: it is left out of every mean, and its advantage is None. The
batcher trains on such a session only if its calls have rewards, or if the run learns only from a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from instar.config import AdvantageConfig
from instar.data.reward_history import MAX_ADVANTAGE, RewardHistory
from instar.types import Floats, Json, Sample, Session

Rewards = Sequence[float | None]
Advantages = list[float | None]
KnownRewards = NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not get huge advantages."""
SIGNAL_THRESHOLD = 1e-8
"""Advantages with an absolute value up to this are treated as zero."""
MAX_SAMPLING_WEIGHT = 2.0
"""Upper bound for the weights in `reweight_truncated_sampling`."""


def _skip_missing(estimate: Callable[[KnownRewards], KnownRewards]) -> Callable[[Rewards], Advantages]:
    """Turn a function of known rewards into an estimator that returns None for missing rewards."""

    @wraps(estimate)
    def estimate_known(rewards: Rewards) -> Advantages:
        known = np.array([r for r in rewards if r is not None], np.float64)
        advantages = iter(estimate(known).tolist() if len(known) else ())
        return [None if r is None else next(advantages) for r in rewards]

    return estimate_known


@_skip_missing
def grpo(rewards: KnownRewards) -> KnownRewards:
    """Return (r - mean) / (std + STD_EPSILON) with the population standard deviation of the group."""
    return (rewards - rewards.mean()) / (rewards.std() + STD_EPSILON)


@_skip_missing
def grpo_no_std(rewards: KnownRewards) -> KnownRewards:
    return rewards - rewards.mean()


@_skip_missing
def rloo(rewards: KnownRewards) -> KnownRewards:
    """Return r - mean of the other sessions' rewards, or 0 if no other session has a reward."""
    others = len(rewards) - 1
    return rewards - (rewards.sum() - rewards) / others if others else np.zeros(1)


ESTIMATORS: dict[str, Callable[[Rewards], Advantages]] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "rloo": rloo,
    "reward": list,
}


class AdvantageEstimator:
    def __init__(self, config: AdvantageConfig, reward_range: tuple[float, float] = (-1.0, 1.0)) -> None:
        self.config = config
        self.history = RewardHistory(sum(reward_range) / 2)
        """The rewards of earlier live sessions."""
        self.baseline: float | None = None
        """The moving average of rewards for the `running` estimator. None before the first reward."""

    def __call__(self, rewards: Rewards) -> Advantages:
        estimate = ESTIMATORS.get(self.config.estimator, self._subtract_baseline)
        return [None if value is None else self.config.weight * value for value in estimate(rewards)]

    def _subtract_baseline(self, rewards: Rewards) -> Advantages:
        """Subtract the moving average, or the mean for the first group, then update the average."""
        known = [r for r in rewards if r is not None]
        if not known:
            return [None] * len(rewards)
        baseline = self.baseline = float(np.mean(known)) if self.baseline is None else self.baseline
        for reward in known:
            self.baseline = self.config.decay * self.baseline + (1 - self.config.decay) * reward
        return [None if r is None else r - baseline for r in rewards]

    def estimate_live(
        self, session: Session, kind: str, reward: float | None, call_rewards: Mapping[str, float]
    ) -> tuple[float, dict[str, float]]:
        """Return the advantage of a live session, and what to add to it on the tokens of each rewarded call.

        Both are relative to the rewards of earlier sessions of this kind (see `reward_history`), whatever the
        estimator for groups is. Their sum is limited like the advantage of a session. A session in which only
        calls have rewards has advantage 0. Its mean reward becomes part of later baselines.
        """
        baseline = self.history.estimate(session.agent_id, kind, session.created_at)
        advantage = 0.0 if reward is None else baseline.compute_advantage(reward)
        by_call = {
            call_id: min(max(advantage + baseline.compute_advantage(value), -MAX_ADVANTAGE), MAX_ADVANTAGE)
            for call_id, value in call_rewards.items()
        }
        value = float(np.mean(list(call_rewards.values()))) if reward is None else reward
        ended_at = session.created_at if session.ended_at is None else session.ended_at
        self.history.add(session.agent_id, kind, ended_at, value)
        weight = self.config.weight
        return weight * advantage, {key: weight * (total - advantage) for key, total in by_call.items()}

    def to_json(self) -> Json:
        """Return the state to checkpoint. It is empty for stateless estimators."""
        state: Json = {"mean": self.baseline} if self.config.estimator == "running" else {}
        history = self.history.to_json()
        return {**state, "live": history} if history else state

    def load_json(self, state: Json) -> None:
        if self.config.estimator == "running":
            self.baseline = state.get("mean")
        self.history.load_json(state.get("live", {}))


def has_signal(advantages: Advantages) -> bool:
    """Return True if any advantage differs from 0 by more than a rounding error."""
    return any(a is not None and abs(a) > SIGNAL_THRESHOLD for a in advantages)


Normalization = Literal["batch_tokens", "batch_sessions", "session_tokens", "none"]


def normalize(samples: Sequence[Sample], mode: Normalization) -> list[Sample]:
    """Divide the advantages by the step's divisor (see `compute_divisor`). With ``session_tokens``, divide
    them by the number of trained tokens in their session times the number of sessions instead."""
    tokens = _count_trained_tokens_by_session(samples)
    common_divisor = compute_divisor(samples, mode)
    divisors = (
        tokens[sample.session_id] * len(tokens) if mode == "session_tokens" else common_divisor
        for sample in samples
    )
    return [
        replace(sample, advantages=(sample.advantages / divisor).astype(np.float32))
        for sample, divisor in zip(samples, divisors, strict=True)
    ]


def compute_divisor(samples: Sequence[Sample], mode: Normalization) -> float:
    """Return the divisor of the step's per-token terms, such as advantages and penalties: the number of
    trained tokens or of sessions in the step, or 1 for ``session_tokens`` and ``none``."""
    match mode:
        case "batch_tokens":
            return sum(_count_trained_tokens_by_session(samples).values())
        case "batch_sessions":
            return len(_count_trained_tokens_by_session(samples))
        case "session_tokens" | "none":
            return 1.0


def _count_trained_tokens_by_session(samples: Sequence[Sample]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for sample in samples:
        tokens[sample.session_id] = tokens.get(sample.session_id, 0) + sample.trained_tokens
    return tokens


def compute_token_scales(
    samples: Sequence[Sample], mode: Normalization, *, recomputed: Collection[str] = ()
) -> list[Floats]:
    """Return, for each sample, the scale of every token's advantage, which is 0 for untrained tokens. Terms
    that are added to the advantages later must be multiplied by these scales. They include the weights of
    `reweight_truncated_sampling`, except for the samples with the keys ``recomputed``."""
    unit_samples = [replace(sample, advantages=sample.mask) for sample in samples]
    reweighted = [
        sample if sample.sample_key in recomputed else reweight_truncated_sampling(sample)
        for sample in unit_samples
    ]
    return [sample.advantages for sample in normalize(reweighted, mode)]


def reweight_truncated_sampling(sample: Sample) -> Sample:
    """Multiply the advantages by p_full / p_sampled, capped at `MAX_SAMPLING_WEIGHT`.

    The losses use logprobs of the full softmax, but tokens may be sampled from another distribution, for
    example with a temperature, top_p or a penalty. Tokens without logprobs and samples without
    ``behavior_logprobs`` are left unchanged.
    """
    if sample.behavior_logprobs is None:
        return sample
    trained = sample.mask > 0
    weights = np.ones(len(sample), dtype=np.float32)
    log_ratio = sample.logprobs[trained] - sample.behavior_logprobs[trained]
    log_ratio = np.where(np.isnan(log_ratio), np.float32(0), log_ratio)
    weights[trained] = np.minimum(np.exp(log_ratio), MAX_SAMPLING_WEIGHT)
    return replace(sample, advantages=sample.advantages * weights)
