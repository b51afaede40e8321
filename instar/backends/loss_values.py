"""Computes the losses of `instar.backends.base` as numbers, from logprobs that a service returned.

The metrics of services differ or are missing; computed here, they have the same meaning for all backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from instar.backends.base import DEFAULT_BETA, DEFAULT_CLIP
from instar.config import LossConfig
from instar.types import Floats, Sample

Doubles = NDArray[np.float64]


def compute_loss(
    loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]
) -> tuple[float, dict[str, float]]:
    """Return the loss, summed over trained tokens, and the same metrics as the local backend. ``logprobs``
    are aligned with the samples' tokens; values under mask 0 are ignored."""
    new = _trained(samples, logprobs)
    old = _trained(samples, [sample.logprobs for sample in samples])
    advantages = _trained(samples, [sample.advantages for sample in samples])
    mask = _trained(samples, [sample.mask for sample in samples])
    metrics = {"tokens": float(len(new))}
    if loss.name == "cross_entropy":
        return float(-(mask * advantages * new).sum()), metrics
    ratio = np.exp(new - old)
    per_token, clipped = _per_token(loss, new, old, ratio, advantages)
    if len(new):
        metrics["ratio_mean"] = float(ratio.mean())
        metrics["ratio_max"] = float(ratio.max())
        metrics["clipped"] = float(clipped.mean())
        metrics["kl"] = float((old - new).mean())
    return float(-(mask * per_token).sum()), metrics


def _per_token(
    loss: LossConfig, new: Doubles, old: Doubles, ratio: Doubles, advantages: Doubles
) -> tuple[Doubles, NDArray[np.bool_]]:
    """Return the value to maximize for each token, and True for each token that was clipped."""
    free = np.zeros(len(new), bool)
    if loss.name == "importance_sampling":
        return ratio * advantages, free
    if loss.name == "dro":
        beta = DEFAULT_BETA if loss.beta is None else loss.beta
        return advantages * new - 0.5 * beta * (new - old) ** 2, free
    bounded = np.clip(ratio, *clip_bounds(loss))
    if loss.name == "ppo":
        limited = bounded * advantages
        return np.minimum(ratio * advantages, limited), limited < ratio * advantages
    return bounded * advantages * new, bounded != ratio


def clip_bounds(loss: LossConfig) -> tuple[float, float]:
    low, high = DEFAULT_CLIP[loss.name]
    return (
        low if loss.clip_low is None else loss.clip_low,
        high if loss.clip_high is None else loss.clip_high,
    )


def _trained(samples: Sequence[Sample], arrays: Sequence[Floats]) -> Doubles:
    parts = [array[sample.mask > 0] for sample, array in zip(samples, arrays, strict=True)]
    return np.concatenate([np.empty(0), *parts]).astype(np.float64)
