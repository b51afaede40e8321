"""Computes advantages from the rewards of a group.

A reward of None (of a failed or unscored session) is left out of every mean, and its advantage is None: the
session is not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from instar.config import AdvantageConfig
from instar.types import Floats, Json, Sample

Rewards = Sequence[float | None]
Advantages = list[float | None]

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not get huge advantages."""
SIGNAL_THRESHOLD = 1e-8
"""The size up to which advantages are considered rounding errors."""
MAX_SAMPLING_WEIGHT = 2.0
"""The largest importance weight of a token that was not sampled from the full softmax."""


# --- estimators ---------------------------------------------------------------------------------


def grpo(rewards: Rewards) -> Advantages:
    """Return (r - mean) / std with the population standard deviation of the group."""
    known = _known_rewards(rewards)
    if not len(known):
        return [None] * len(rewards)
    mean, std = known.mean(), known.std()
    return [None if r is None else float((r - mean) / (std + STD_FLOOR)) for r in rewards]


def grpo_no_std(rewards: Rewards) -> Advantages:
    known = _known_rewards(rewards)
    return [None if r is None else float(r - known.mean()) for r in rewards]


def rloo(rewards: Rewards) -> Advantages:
    """Return r - mean of the rewards of the other sessions, or 0 if there are no others."""
    known = _known_rewards(rewards)
    count, total = len(known), float(known.sum())
    if count < 2:
        return [None if r is None else 0.0 for r in rewards]
    return [None if r is None else float(r - (total - r) / (count - 1)) for r in rewards]


class RunningBaseline(msgspec.Struct):
    """An estimator for groups of one: r - a moving mean over sessions. Its state is part of checkpoints."""

    decay: float
    mean: float | None = None
    """The moving mean. None until the first rewards, which use their own mean as the baseline."""

    def __call__(self, rewards: Rewards) -> Advantages:
        """Return advantages relative to the mean before this group, then update the mean."""
        known = _known_rewards(rewards)
        if not len(known):
            return [None] * len(rewards)
        baseline = float(known.mean()) if self.mean is None else self.mean
        self.mean = baseline
        for reward in known:
            self.mean = self.decay * self.mean + (1 - self.decay) * float(reward)
        return [None if r is None else r - baseline for r in rewards]

    def to_json(self) -> Json:
        return {"mean": self.mean}

    def load_json(self, state: Json) -> None:
        self.mean = state.get("mean")


class AdvantageEstimator:
    """The configured estimator, and the state that it keeps between groups."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config
        self.baseline = RunningBaseline(config.decay)

    def __call__(self, rewards: Rewards) -> Advantages:
        weight = self.config.weight
        return [None if value is None else weight * value for value in self._estimate(rewards)]

    def _estimate(self, rewards: Rewards) -> Advantages:
        match self.config.estimator:
            case "grpo":
                return grpo(rewards)
            case "grpo_no_std":
                return grpo_no_std(rewards)
            case "rloo":
                return rloo(rewards)
            case "running":
                return self.baseline(rewards)
            case "reward":
                return list(rewards)

    def to_json(self) -> Json:
        return self.baseline.to_json() if self.config.estimator == "running" else {}

    def load_json(self, state: Json) -> None:
        if self.config.estimator == "running":
            self.baseline.load_json(state)


def has_signal(advantages: Advantages) -> bool:
    """Return True if any advantage differs from 0. If all rewards are equal, none does."""
    return any(a is not None and abs(a) > SIGNAL_THRESHOLD for a in advantages)


def _known_rewards(rewards: Rewards) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([r for r in rewards if r is not None], dtype=np.float64)


# --- scaling --------------------------------------------------------------------------------------

Normalization = Literal["batch_tokens", "batch_sessions", "session_tokens", "none"]


def normalize(samples: Sequence[Sample], mode: Normalization) -> list[Sample]:
    """Return the samples with their advantages divided by the divisor of the step's sum over tokens. Sessions
    without trained tokens in this step do not count."""
    tokens = _trained_tokens_by_session(samples)
    common_divisor = compute_divisor(samples, mode)

    def sample_divisor(sample: Sample) -> float:
        return tokens[sample.session_id] * len(tokens) if mode == "session_tokens" else common_divisor

    return [
        replace(sample, advantages=(sample.advantages / sample_divisor(sample)).astype(np.float32))
        for sample in samples
    ]


def compute_divisor(samples: Sequence[Sample], mode: Normalization) -> float:
    """Return the divisor of the step's sum over tokens, or 1 if every session has its own divisor."""
    match mode:
        case "batch_tokens":
            return sum(_trained_tokens_by_session(samples).values())
        case "batch_sessions":
            return len(_trained_tokens_by_session(samples))
        case "session_tokens" | "none":
            return 1.0


def _trained_tokens_by_session(samples: Sequence[Sample]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for sample in samples:
        tokens[sample.session_id] = tokens.get(sample.session_id, 0) + sample.trained_tokens
    return tokens


def compute_token_scales(
    samples: Sequence[Sample], mode: Normalization, *, should_reweight: bool = True
) -> list[Floats]:
    """Return one array per sample: the scaled value of an advantage of 1 on each trained token. Terms that
    are added to the advantages later are multiplied by these scales. With ``should_reweight``, the scales
    include the weights of `reweight_truncated_sampling`.
    """
    ones = [replace(sample, advantages=sample.mask) for sample in samples]
    if should_reweight:
        ones = [reweight_truncated_sampling(sample) for sample in ones]
    return [sample.advantages for sample in normalize(ones, mode)]


def reweight_truncated_sampling(sample: Sample) -> Sample:
    """Return the sample with the advantages of tokens that were not drawn from the full softmax multiplied by
    p_full / p_sampled, capped. The losses use ``logprobs``, which are from the full softmax. Tokens without
    logprobs are left unchanged."""
    if sample.behavior_logprobs is None:
        return sample
    trained = sample.mask > 0
    weights = np.ones(len(sample), dtype=np.float32)
    gap = sample.logprobs[trained] - sample.behavior_logprobs[trained]
    weights[trained] = np.minimum(np.exp(np.where(np.isnan(gap), np.float32(0), gap)), MAX_SAMPLING_WEIGHT)
    return replace(sample, advantages=sample.advantages * weights)
