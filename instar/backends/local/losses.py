"""The losses of `instar.backends.base`, each a plain sum over trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instar.backends.base import DEFAULT_BETA, LOSSES
from instar.backends.loss_values import clip_bounds
from instar.config import LossConfig

USES_OLD_LOGPROBS = LOSSES - {"cross_entropy"}


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The trained tokens of a batch, one entry each."""

    mask: Tensor
    advantages: Tensor
    logprobs: Tensor
    """The logprobs at sampling; NaN if the loss does not need them."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums that the metrics are computed from. They are added up over micro-batches."""

    tokens: int
    ratio: float
    ratio_max: float
    clipped: int
    kl: float


def token_loss(config: LossConfig, new: Tensor, tokens: TrainedTokens) -> tuple[Tensor, LossSums]:
    """Return the loss and the sums for the metrics. ``new`` are the logprobs under the current weights (fp32,
    with gradient)."""
    weight = tokens.mask * tokens.advantages
    if config.name == "cross_entropy":
        return -(weight * new).sum(), LossSums(len(new), 0.0, 0.0, 0, 0.0)
    ratio = torch.exp(new - tokens.logprobs)
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if config.name == "importance_sampling":
        loss = -(weight * ratio).sum()
    elif config.name == "ppo":
        bounded = ratio.clamp(*clip_bounds(config))
        free, limited = ratio * tokens.advantages, bounded * tokens.advantages
        clipped = limited < free
        loss = -(tokens.mask * torch.minimum(free, limited)).sum()
    elif config.name == "dro":
        beta = DEFAULT_BETA if config.beta is None else config.beta
        distance = (new - tokens.logprobs).square()
        loss = -(tokens.mask * (tokens.advantages * new - 0.5 * beta * distance)).sum()
    else:
        bounded = ratio.detach().clamp(*clip_bounds(config))
        clipped = bounded != ratio
        loss = -(weight * bounded * new).sum()
    return loss, _sums(new.detach(), ratio.detach(), clipped, tokens)


def _sums(new: Tensor, ratio: Tensor, clipped: Tensor, tokens: TrainedTokens) -> LossSums:
    if len(new) == 0:
        return LossSums(0, 0.0, 0.0, 0, 0.0)
    return LossSums(
        tokens=len(new),
        ratio=float(ratio.sum()),
        ratio_max=float(ratio.max()),
        clipped=int(clipped.sum()),
        kl=float((tokens.logprobs - new).sum()),
    )


def metrics(config: LossConfig, parts: Sequence[LossSums]) -> dict[str, float]:
    """Return the metrics by name. ``kl`` is the mean of old - new logprob, an estimate of KL(old ‖ new)."""
    count = sum(part.tokens for part in parts)
    result = {"tokens": float(count)}
    if count and config.name in USES_OLD_LOGPROBS:
        result["ratio_mean"] = sum(part.ratio for part in parts) / count
        result["ratio_max"] = max(part.ratio_max for part in parts)
        result["clipped"] = sum(part.clipped for part in parts) / count
        result["kl"] = sum(part.kl for part in parts) / count
    return result
