"""Corrects for tokens that were sampled by a policy other than the trained one.

A token has three logprobs. The *behavior* logprob is from the distribution that the token was sampled from,
by a possibly older policy in an engine with slightly different numerics. The *proximal* logprob is from the
trained policy at the start of the step. The *new* logprob is from the policy during the update, and is the
one that gradients flow through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from instar.config import OffPolicyConfig
from instar.errors import BackendError
from instar.types import Floats, Json, Sample

DEFAULT_MAX_WEIGHT = 2.0
"""The maximum importance weight if `truncate` is not set."""
MAX_LOGPROB_DIFFERENCE = 60.0
"""Logprob differences are clipped to this, because larger ratios carry no information."""


def get_behavior_logprobs(sample: Sample) -> Floats:
    return sample.logprobs if sample.behavior_logprobs is None else sample.behavior_logprobs


def apply_decoupled_ppo(
    samples: Sequence[Sample], scales: Sequence[Floats], proximal: Sequence[Floats], config: OffPolicyConfig
) -> tuple[list[Sample], list[Floats], Json]:
    """Apply decoupled PPO. Return the corrected samples, their new scales, and metrics.

    The proximal logprobs replace the samples' logprobs, so that the loss computes its ratio relative to them.
    The advantages are multiplied by the truncated importance weight from behavior to proximal. So are the
    ``scales``, which apply to the reference penalty that is added to the advantages later. Tokens with a
    ratio above ``drop_above`` or below its inverse are masked, but still count in the step's divisor, so that
    the other tokens keep their weight. Raises BackendError if a trained token has no finite proximal logprob.
    """
    corrected: list[Sample] = []
    new_scales: list[Floats] = []
    truncated = dropped = 0
    max_weight = DEFAULT_MAX_WEIGHT if config.truncate is None else config.truncate
    for sample, scale, logprobs in zip(samples, scales, proximal, strict=True):
        _require_logprobs(sample, logprobs)
        trained = sample.mask > 0
        ratio = np.ones(len(sample))
        ratio[trained] = _compute_likelihood_ratio(logprobs[trained], get_behavior_logprobs(sample)[trained])
        kept = np.ones(len(ratio), bool)
        if config.drop_above is not None:
            kept = (ratio <= config.drop_above) & (ratio >= 1.0 / config.drop_above)
        weight = (np.minimum(ratio, max_weight) * kept).astype(np.float32)
        truncated += int((trained & kept & (ratio > max_weight)).sum())
        dropped += int((~kept).sum())
        new_scales.append(scale * weight)
        corrected.append(
            replace(
                sample,
                mask=sample.mask * kept,
                logprobs=np.where(trained, logprobs, sample.logprobs).astype(np.float32),
                advantages=sample.advantages * weight,
            )
        )
    count = sum(sample.trained_tokens for sample in samples)
    return corrected, new_scales, {"truncated": truncated / max(1, count), "dropped_tokens": dropped}


def compute_importance_metrics(samples: Sequence[Sample], logprobs: Sequence[Floats]) -> Json:
    """Return statistics of the likelihood ratio between the trained and the behavior policy. ``ess`` is the
    effective sample size divided by the number of tokens. Empty if no trained token has both logprobs."""
    parts = [
        _compute_likelihood_ratio(new[sample.mask > 0], get_behavior_logprobs(sample)[sample.mask > 0])
        for sample, new in zip(samples, logprobs, strict=True)
    ]
    ratio = np.concatenate([np.empty(0), *parts])
    ratio = ratio[~np.isnan(ratio)]  # exported data for imitation learning may have no logprobs
    if not len(ratio):
        return {}
    return {
        "importance_mean": float(ratio.mean()),
        "importance_max": float(ratio.max()),
        "importance_p99": float(np.quantile(ratio, 0.99)),
        "ess": float(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)),
    }


def estimate_kl(samples: Sequence[Sample], before: Sequence[Floats], after: Sequence[Floats]) -> float | None:
    """Return half of the mean squared difference between two policies' logprobs of the trained tokens, which
    approximates their KL divergence per token if it is small. Return None if there are no logprobs."""
    parts = [
        new[sample.mask > 0] - old[sample.mask > 0]
        for sample, old, new in zip(samples, before, after, strict=True)
    ]
    differences = np.concatenate([np.empty(0), *parts])
    differences = differences[np.isfinite(differences)]
    return float(0.5 * np.mean(differences**2)) if len(differences) else None


def _compute_likelihood_ratio(numerator: Floats, denominator: Floats) -> NDArray[np.float64]:
    difference = numerator.astype(np.float64) - denominator.astype(np.float64)
    return np.exp(np.clip(difference, -MAX_LOGPROB_DIFFERENCE, MAX_LOGPROB_DIFFERENCE))


def _require_logprobs(sample: Sample, logprobs: Floats) -> None:
    missing = np.flatnonzero((sample.mask > 0) & ~np.isfinite(logprobs))
    if len(missing):
        raise BackendError(
            f"sample {sample.sample_key}: the backend returned no finite logprob for the trained token at "
            f"index {missing[0]}"
        )
