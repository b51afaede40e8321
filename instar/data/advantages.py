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
NO_SIGNAL = 1e-8
"""Advantages this small all over a group teach nothing: they are rounding."""
WEIGHT_CAP = 2.0
"""Largest importance weight for a token that was not sampled from the full softmax."""


# --- estimators ---------------------------------------------------------------------------------


def grpo(rewards: Rewards) -> Advantages:
    """(r - mean) / std, the standard deviation being that of the group itself (not of a sample)."""
    given = _given(rewards)
    if not len(given):
        return [None] * len(rewards)
    mean, std = given.mean(), given.std()
    return [None if r is None else float((r - mean) / (std + STD_FLOOR)) for r in rewards]


def grpo_no_std(rewards: Rewards) -> Advantages:
    """r - mean."""
    given = _given(rewards)
    return [None if r is None else float(r - given.mean()) for r in rewards]


def rloo(rewards: Rewards) -> Advantages:
    """r - the mean of the others; 0 for a session that has no others."""
    given = _given(rewards)
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
        given = _given(rewards)
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


class Estimator:
    """The configured estimator, with the state that it carries from group to group."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config
        self.running = RunningBaseline(config.decay)

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
                return self.running(rewards)
            case "reward":
                return list(rewards)

    def to_json(self) -> Json:
        return self.running.to_json() if self.config.estimator == "running" else {}

    def load_json(self, state: Json) -> None:
        if self.config.estimator == "running":
            self.running.load_json(state)


def has_signal(advantages: Advantages) -> bool:
    """Whether a group teaches anything: False when all its rewards are equal."""
    return any(a is not None and abs(a) > NO_SIGNAL for a in advantages)


def _given(rewards: Rewards) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([r for r in rewards if r is not None], dtype=np.float64)


# --- what a step's samples are scaled by --------------------------------------------------------

Normalize = Literal["batch_tokens", "batch_sessions", "session_tokens", "none"]


def normalize(samples: Sequence[Sample], how: Normalize) -> list[Sample]:
    """Fold what the step's token sum is divided by into the advantages. Sessions that train nothing in
    this step do not count."""
    tokens = _tokens_of_sessions(samples)
    of_all = divisor(samples, how)

    def of_one(sample: Sample) -> float:
        return tokens[sample.session_id] * len(tokens) if how == "session_tokens" else of_all

    return [
        replace(sample, advantages=(sample.advantages / of_one(sample)).astype(np.float32))
        for sample in samples
    ]


def divisor(samples: Sequence[Sample], how: Normalize) -> float:
    """What the step's token sum is divided by; 1 where every session has a divisor of its own."""
    match how:
        case "batch_tokens":
            return sum(_tokens_of_sessions(samples).values())
        case "batch_sessions":
            return len(_tokens_of_sessions(samples))
        case "session_tokens" | "none":
            return 1.0


def _tokens_of_sessions(samples: Sequence[Sample]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for sample in samples:
        tokens[sample.session_id] = tokens.get(sample.session_id, 0) + sample.trained_tokens
    return tokens


def token_scales(samples: Sequence[Sample], how: Normalize, *, correct: bool = True) -> list[Floats]:
    """Per sample, what an advantage of 1 on each trained token comes to in this step: what is added to the
    advantages later is scaled alike. ``correct``: `correct_sampling` is part of it."""
    ones = [replace(sample, advantages=sample.mask) for sample in samples]
    if correct:
        ones = [correct_sampling(sample) for sample in ones]
    return [sample.advantages for sample in normalize(ones, how)]


def correct_sampling(sample: Sample) -> Sample:
    """Fold the weight p_full / p_sampled, capped, into the advantages of tokens that were drawn from another
    distribution than the full softmax. The losses compare with ``logprobs``, those of the full softmax. A
    token without logprobs counts as it is."""
    if sample.behavior_logprobs is None:
        return sample
    trained = sample.mask > 0
    weights = np.ones(len(sample), dtype=np.float32)
    gap = sample.logprobs[trained] - sample.behavior_logprobs[trained]
    weights[trained] = np.minimum(np.exp(np.where(np.isnan(gap), np.float32(0), gap)), WEIGHT_CAP)
    return replace(sample, advantages=sample.advantages * weights)
