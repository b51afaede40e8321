"""From the rewards of a group to advantages.

A reward of None (a failed session, or one nobody scored) is kept out of every mean, and its
advantage is None: that session is not trained on.
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
"""Added to the standard deviation, so that rewards that hardly differ do not blow up."""
SIGNAL_THRESHOLD = 1e-8
"""Advantages this small all over a group teach nothing: they are rounding."""
MAX_SAMPLING_WEIGHT = 2.0
"""Largest importance weight for a token that was not sampled from the full softmax."""


# --- estimators ---------------------------------------------------------------------------------


def grpo(rewards: Rewards) -> Advantages:
    """(r - mean) / std, the standard deviation being that of the group itself (not of a sample)."""
    given = _known_rewards(rewards)
    if not len(given):
        return [None] * len(rewards)
    mean, std = given.mean(), given.std()
    return [None if r is None else float((r - mean) / (std + STD_FLOOR)) for r in rewards]


def grpo_no_std(rewards: Rewards) -> Advantages:
    """r - mean."""
    given = _known_rewards(rewards)
    return [None if r is None else float(r - given.mean()) for r in rewards]


def rloo(rewards: Rewards) -> Advantages:
    """r - the mean of the others; 0 for a session that has no others."""
    given = _known_rewards(rewards)
    count, total = len(given), float(given.sum())
    if count < 2:
        return [None if r is None else 0.0 for r in rewards]
    return [None if r is None else float(r - (total - r) / (count - 1)) for r in rewards]


class RunningBaseline(msgspec.Struct):
    """r - a mean that moves with every session; for groups of one. Its state goes into checkpoints."""

    decay: float
    mean: float | None = None
    """None until the first reward, which is its own baseline."""

    def __call__(self, rewards: Rewards) -> Advantages:
        """Advantages against what was known before this group; then the mean moves."""
        given = _known_rewards(rewards)
        if not len(given):
            return [None] * len(rewards)
        baseline = float(given.mean()) if self.mean is None else self.mean
        self.mean = baseline
        for reward in given:
            self.mean = self.decay * self.mean + (1 - self.decay) * float(reward)
        return [None if r is None else r - baseline for r in rewards]

    def to_json(self) -> Json:
        return {"mean": self.mean}

    def load_json(self, state: Json) -> None:
        self.mean = state.get("mean")


class AdvantageEstimator:
    """The configured estimator, with the state that it carries from group to group."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config
        self.baseline = RunningBaseline(config.decay)

    def __call__(self, rewards: Rewards) -> Advantages:
        """Weighted by what rewards count for."""
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
    """Whether a group teaches anything: False when all its rewards are equal."""
    return any(a is not None and abs(a) > SIGNAL_THRESHOLD for a in advantages)


def _known_rewards(rewards: Rewards) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([r for r in rewards if r is not None], dtype=np.float64)


# --- what a step's samples are scaled by --------------------------------------------------------

Normalization = Literal["batch_tokens", "batch_sessions", "session_tokens", "none"]


def normalize(samples: Sequence[Sample], mode: Normalization) -> list[Sample]:
    """Fold what the step's token sum is divided by into the advantages. Sessions that train nothing in
    this step do not count."""
    tokens = _trained_tokens_by_session(samples)
    of_all = compute_divisor(samples, mode)

    def of_one(sample: Sample) -> float:
        return tokens[sample.session_id] * len(tokens) if mode == "session_tokens" else of_all

    return [
        replace(sample, advantages=(sample.advantages / of_one(sample)).astype(np.float32))
        for sample in samples
    ]


def compute_divisor(samples: Sequence[Sample], mode: Normalization) -> float:
    """What the step's token sum is divided by; 1 where every session has a divisor of its own."""
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
    """Per sample, what an advantage of 1 on each trained token comes to in this step: what is added to the
    advantages later is scaled alike. ``correct``: `correct_sampling` is part of it."""
    ones = [replace(sample, advantages=sample.mask) for sample in samples]
    if should_reweight:
        ones = [reweight_truncated_sampling(sample) for sample in ones]
    return [sample.advantages for sample in normalize(ones, mode)]


def reweight_truncated_sampling(sample: Sample) -> Sample:
    """Fold the weight p_full / p_sampled, capped, into the advantages of tokens that were drawn from another
    distribution than the full softmax. The losses compare with ``logprobs``, those of the full softmax. A
    token without logprobs counts as it is."""
    if sample.behavior_logprobs is None:
        return sample
    trained = sample.mask > 0
    weights = np.ones(len(sample), dtype=np.float32)
    gap = sample.logprobs[trained] - sample.behavior_logprobs[trained]
    weights[trained] = np.minimum(np.exp(np.where(np.isnan(gap), np.float32(0), gap)), MAX_SAMPLING_WEIGHT)
    return replace(sample, advantages=sample.advantages * weights)
