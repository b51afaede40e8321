"""The losses in float64, token by token, without using any backend's code."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instar.config import LossConfig
from instar.types import Floats, Sample


def reference_loss(loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]) -> float:
    """Return the loss that `instar.backends.base` defines. ``logprobs`` are the new logprobs of the samples'
    tokens."""
    total = 0.0
    for sample, new in zip(samples, logprobs, strict=True):
        for i, weight in enumerate(sample.mask.tolist()):
            if weight > 0:
                total -= weight * _gain(loss, float(new[i]), float(sample.logprobs[i]), sample.advantages[i])
    return total


def _gain(loss: LossConfig, new: float, old: float, advantage: float) -> float:
    advantage = float(advantage)
    if loss.name == "cross_entropy":
        return advantage * new
    if loss.name == "dro":
        beta = 0.05 if loss.beta is None else loss.beta
        return advantage * new - beta / 2 * (new - old) * (new - old)
    ratio = math.exp(new - old)
    if loss.name == "importance_sampling":
        return ratio * advantage
    low, high = (0.8, 1.2) if loss.name == "ppo" else (0.0, 4.0)
    low = low if loss.clip_low is None else loss.clip_low
    high = high if loss.clip_high is None else loss.clip_high
    bounded = max(low, min(high, ratio))
    if loss.name == "ppo":
        return min(ratio * advantage, bounded * advantage)
    return bounded * advantage * new
