"""Compute the losses of `instar.backends.base` from the logprobs that services and verl return.

Services and verl report different metrics, or none. The metrics computed here are the same for all backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from instar.backends.base import DEFAULT_BETA, DEFAULT_CLIP
from instar.config import LossConfig
from instar.errors import NonFiniteError
from instar.types import Floats, Sample

Doubles = NDArray[np.float64]
MAX_SAMPLES_IN_ERROR = 4


@np.errstate(over="ignore", invalid="ignore")
def compute_loss(
    loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]
) -> tuple[float, dict[str, float]]:
    """Return the loss, summed over trained tokens, and the metrics of `instar.backends.local.losses`.
    ``logprobs`` are aligned with the samples' tokens; values of tokens that are not trained are ignored."""
    new_logprobs = _concat_trained(samples, logprobs)
    old_logprobs = _concat_trained(samples, [sample.logprobs for sample in samples])
    advantages = _concat_trained(samples, [sample.advantages for sample in samples])
    mask = _concat_trained(samples, [sample.mask for sample in samples])
    metrics = {"tokens": float(len(new_logprobs))}
    if loss.name == "cross_entropy":
        return float(-(mask * advantages * new_logprobs).sum()), metrics
    ratio = np.exp(new_logprobs - old_logprobs)
    objective, is_clipped = _compute_token_objective(loss, new_logprobs, old_logprobs, ratio, advantages)
    if len(new_logprobs):
        metrics["ratio_mean"] = float(ratio.mean())
        metrics["ratio_max"] = float(ratio.max())
        metrics["clipped"] = float(is_clipped.mean())
        metrics["kl"] = float((old_logprobs - new_logprobs).mean())
    return float(-(mask * objective).sum()), metrics


def make_non_finite_error(
    loss: LossConfig,
    samples: Sequence[Sample],
    logprobs: Sequence[Floats],
    dtype: type[np.floating] = np.float64,
) -> NonFiniteError:
    """Return an error that names the samples with a non-finite loss in ``dtype``, or else all samples."""
    with np.errstate(over="ignore"):
        values = [dtype(compute_loss(loss, [s], [row])[0]) for s, row in zip(samples, logprobs, strict=True)]
    all_keys = [sample.sample_key for sample in samples]
    keys = [key for key, value in zip(all_keys, values, strict=True) if not np.isfinite(value)] or all_keys
    names = ", ".join(keys[:MAX_SAMPLES_IN_ERROR]) + (", ..." if len(keys) > MAX_SAMPLES_IN_ERROR else "")
    return NonFiniteError(
        f"non-finite {loss.name} loss; check the logprobs and advantages of samples {names}"
    )


def _compute_token_objective(
    loss: LossConfig, new_logprobs: Doubles, old_logprobs: Doubles, ratio: Doubles, advantages: Doubles
) -> tuple[Doubles, NDArray[np.bool_]]:
    """Return each token's objective, which is maximized, and whether clipping changed it."""
    none_clipped = np.zeros(len(new_logprobs), bool)
    if loss.name == "importance_sampling":
        return ratio * advantages, none_clipped
    if loss.name == "dro":
        beta = DEFAULT_BETA if loss.beta is None else loss.beta
        return advantages * new_logprobs - 0.5 * beta * (new_logprobs - old_logprobs) ** 2, none_clipped
    clipped_ratio = np.clip(ratio, *get_clip_bounds(loss))
    if loss.name == "ppo":
        # An infinite ratio times an advantage of 0 would be NaN.
        unclipped = np.where(advantages == 0, 0.0, ratio * advantages)
        clipped = clipped_ratio * advantages
        return np.minimum(unclipped, clipped), clipped < unclipped
    return clipped_ratio * advantages * new_logprobs, clipped_ratio != ratio


def get_clip_bounds(loss: LossConfig) -> tuple[float, float]:
    low, high = DEFAULT_CLIP[loss.name]
    return (
        low if loss.clip_low is None else loss.clip_low,
        high if loss.clip_high is None else loss.clip_high,
    )


def _concat_trained(samples: Sequence[Sample], arrays: Sequence[Floats]) -> Doubles:
    parts = [array[sample.mask > 0] for sample, array in zip(samples, arrays, strict=True)]
    return np.concatenate([np.empty(0), *parts]).astype(np.float64)
