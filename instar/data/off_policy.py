"""Tokens that another policy than the trained one has sampled: how far off they are, what becomes of them.

Three logprobs of a token are told apart: the *behavior*'s, of the distribution that it was drawn from, be it
an older version's or that of the same weights in an engine that computes a little differently; the
*proximal*'s, of the trained policy as its step begins; and the new one, which the loss moves. Each token has
its own, so a reply sampled across an update needs no further care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from instar.config import OffPolicyConfig
from instar.errors import BackendError
from instar.types import Floats, Json, Sample

Doubles = NDArray[np.float64]

DEFAULT_TRUNCATE = 2.0
"""Largest importance weight, unless the config says another."""
MAX_LOGPROB_GAP = 60.0
"""Of two logprobs, as far as figures follow: beyond it the ratio of the two says nothing more."""


def get_behavior_logprobs(sample: Sample) -> Floats:
    """The logprobs of what the tokens were really drawn from."""
    return sample.logprobs if sample.behavior_logprobs is None else sample.behavior_logprobs


def decouple(
    samples: Sequence[Sample],
    scales: Sequence[Floats],
    proximal: Sequence[Floats],
    config: OffPolicyConfig,
) -> tuple[list[Sample], list[Floats], Json]:
    """Decoupled PPO. The loss's ratio is to the proximal logprobs, which become the samples' own; the
    importance weight from behavior to proximal, truncated, goes into the advantages, and into ``scales``
    for what is added to them later. Tokens beyond ``drop_above`` are not trained; they still count in what
    the step is divided by, so that the others weigh what they did. Returns what to report as well."""
    corrected: list[Sample] = []
    weighted: list[Floats] = []
    cut = left_out = 0
    largest = DEFAULT_TRUNCATE if config.truncate is None else config.truncate
    for sample, scale, logprobs in zip(samples, scales, proximal, strict=True):
        _require(sample, logprobs)
        trained = sample.mask > 0
        ratio = np.ones(len(sample))
        ratio[trained] = _ratio(logprobs[trained], get_behavior_logprobs(sample)[trained])
        kept = _kept(ratio, config.drop_above)
        weight = (np.minimum(ratio, largest) * kept).astype(np.float32)
        cut += int((trained & kept & (ratio > largest)).sum())
        left_out += int((~kept).sum())
        weighted.append(scale * weight)
        corrected.append(
            replace(
                sample,
                mask=sample.mask * kept,
                logprobs=np.where(trained, logprobs, sample.logprobs).astype(np.float32),
                advantages=sample.advantages * weight,
            )
        )
    count = sum(sample.trained_tokens for sample in samples)
    return corrected, weighted, {"truncated": cut / max(1, count), "left_out_tokens": left_out}


def compute_importance(samples: Sequence[Sample], logprobs: Sequence[Floats]) -> Json:
    """Figures of the trained policy's likelihood of the trained tokens against the behavior's: what the ratio
    is on average and at its largest, and ``ess``, the effective sample size, as a share of the tokens."""
    parts = [
        _ratio(new[sample.mask > 0], get_behavior_logprobs(sample)[sample.mask > 0])
        for sample, new in zip(samples, logprobs, strict=True)
    ]
    ratio = np.concatenate([np.empty(0), *parts])
    ratio = ratio[~np.isnan(ratio)]  # imitated data may come without logprobs
    if not len(ratio):
        return {}
    return {
        "importance_mean": float(ratio.mean()),
        "importance_max": float(ratio.max()),
        "importance_p99": float(np.quantile(ratio, 0.99)),
        "ess": float(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)),
    }


def _ratio(above: Floats, below: Floats) -> Doubles:
    gap = above.astype(np.float64) - below.astype(np.float64)
    return np.exp(np.clip(gap, -MAX_LOGPROB_GAP, MAX_LOGPROB_GAP))


def _kept(ratio: Doubles, drop_above: float | None) -> NDArray[np.bool_]:
    if drop_above is None:
        return np.ones(len(ratio), bool)
    return (ratio <= drop_above) & (ratio >= 1.0 / drop_above)


def _require(sample: Sample, logprobs: Floats) -> None:
    missing = np.flatnonzero((sample.mask > 0) & ~np.isfinite(logprobs))
    if len(missing):
        raise BackendError(
            f"sample {sample.sample_key}: the backend told no logprob for the token trained at {missing[0]}"
        )
