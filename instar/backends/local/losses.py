"""The losses of `instar.backends.base` in torch, each a plain sum over trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instar.backends.base import DEFAULT_BETA
from instar.backends.loss_values import get_clip_bounds
from instar.config import LossConfig


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    mask: Tensor
    advantages: Tensor
    logprobs: Tensor
    """The samples' logprobs. They may be NaN if the loss does not use them."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums and a maximum over the trained tokens of a micro-batch, used to compute the metrics."""

    token_count: int = 0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    clipped_count: int = 0
    kl_sum: float = 0.0


def compute_token_loss(
    config: LossConfig, new_logprobs: Tensor, tokens: TrainedTokens
) -> tuple[Tensor, LossSums]:
    """Return the loss and the sums for the metrics. ``new_logprobs`` are in fp32 and have a gradient."""
    weight = tokens.mask * tokens.advantages
    if config.name == "cross_entropy":
        return -(weight * new_logprobs).sum(), LossSums(len(new_logprobs))
    log_ratio = new_logprobs - tokens.logprobs
    ratio = torch.exp(log_ratio)
    is_clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if config.name == "importance_sampling":
        loss = -(weight * ratio).sum()
    elif config.name == "ppo":
        low, high = get_clip_bounds(config)
        # Above the upper bound, only negative advantages have a gradient. An infinite ratio would make the
        # others' NaN.
        is_bounded = (tokens.advantages >= 0) & (ratio > high)
        finite_ratio = torch.exp(log_ratio.masked_fill(is_bounded, 0.0)).masked_fill(is_bounded, 2 * high)
        unclipped, clipped = (x * tokens.advantages for x in (finite_ratio, finite_ratio.clamp(low, high)))
        is_clipped = clipped < unclipped
        loss = -(tokens.mask * torch.minimum(unclipped, clipped)).sum()
    elif config.name == "dro":
        beta = DEFAULT_BETA if config.beta is None else config.beta
        squared_difference = (new_logprobs - tokens.logprobs).square()
        loss = -(tokens.mask * (tokens.advantages * new_logprobs - 0.5 * beta * squared_difference)).sum()
    else:
        clipped_ratio = ratio.detach().clamp(*get_clip_bounds(config))
        is_clipped = clipped_ratio != ratio
        loss = -(weight * clipped_ratio * new_logprobs).sum()
    if len(new_logprobs) == 0:
        return loss, LossSums()
    sums = LossSums(
        token_count=len(new_logprobs),
        ratio_sum=float(ratio.detach().sum()),
        ratio_max=float(ratio.detach().max()),
        clipped_count=int(is_clipped.sum()),
        kl_sum=float((tokens.logprobs - new_logprobs.detach()).sum()),
    )
    return loss, sums


def compute_metrics(config: LossConfig, sums: Sequence[LossSums]) -> dict[str, float]:
    """Return the metrics by name. cross_entropy has only ``tokens``. ``kl`` is the mean of old - new logprob,
    an estimate of KL(old ‖ new)."""
    count = sum(part.token_count for part in sums)
    metrics = {"tokens": float(count)}
    if count and config.name != "cross_entropy":
        metrics["ratio_mean"] = sum(part.ratio_sum for part in sums) / count
        metrics["ratio_max"] = max(part.ratio_max for part in sums)
        metrics["clipped"] = sum(part.clipped_count for part in sums) / count
        metrics["kl"] = sum(part.kl_sum for part in sums) / count
    return metrics
