"""Vectorized sampling for all rows of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instar.engines.local.penalties import LogitPenalties
from instar.errors import EngineError
from instar.types import Floats, Ids, SamplingParams

BLOCK_SIZE = 128
Masks = Mapping[int, NDArray[np.bool_]]
Penalties = Mapping[int, LogitPenalties]
_NO_MASKS: Masks = {}
_NO_PENALTIES: Penalties = {}
NON_FINITE_LOGITS = "The model returned non-finite logits (NaN or inf); check the policy's weights."


@dataclass(frozen=True, slots=True)
class SampledTokens:
    ids: list[int]
    logprobs: list[float]
    """The logprobs under the full softmax."""
    behavior_logprobs: list[float | None]
    """The logprobs under the distribution that was sampled from; None if that is the full softmax."""


class Sampler:
    """Samples one token for each row. Buffers are reused, because new ones would cause slow page faults."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._logits = torch.empty(0, 0)
        self._weights = torch.empty(0, 0)

    def draw(
        self,
        logits_N_V: Tensor,
        params: Sequence[SamplingParams],
        rngs: Sequence[Random],
        masks: Masks = _NO_MASKS,
        penalties: Penalties = _NO_PENALTIES,
    ) -> SampledTokens:
        """Sample one token for each row. A row in ``masks`` samples only from the tokens that are True.
        ``penalties`` has the rows whose parameters modify the logits."""
        rows, vocab = logits_N_V.shape
        logits, weights = self._get_buffers(rows, vocab)
        logits[:, :vocab].copy_(logits_N_V)
        greedy = [i for i, p in enumerate(params) if p.temperature == 0]
        is_modified = [p.modifies_distribution for p in params]
        uniform = torch.tensor([[r.random()] for r in rngs], dtype=torch.float32).to(self._device)
        max_logit, total, ids = _sample_cdf(logits, weights, uniform, skip_sampling=len(greedy) == rows)
        behavior = torch.full_like(total, torch.nan)
        if greedy:
            index = slice(None) if len(greedy) == rows else torch.tensor(greedy, device=self._device)
            ids[index] = logits[index].argmax(-1, keepdim=True)
            behavior[index] = 0.0
            for row in (masks.keys() | penalties.keys()).intersection(greedy):
                ids[row] = _adjust_logits(logits[[row]], [row], masks, penalties).argmax(-1)
        modified = [i for i, p in enumerate(params) if is_modified[i] and p.temperature > 0]
        truncated = [i for i in modified if params[i].is_truncated]
        for rows_to_draw in ([i for i in modified if not params[i].is_truncated], truncated):
            if rows_to_draw:
                index = torch.tensor(rows_to_draw, device=self._device)
                adjusted = _adjust_logits(logits[index], rows_to_draw, masks, penalties)
                row_params = [params[i] for i in rows_to_draw]
                ids[index], behavior[index] = _draw_modified(adjusted, row_params, uniform[index])
        logprobs = logits.gather(1, ids) - max_logit - total.log()
        # One transfer for all values, so that the step waits for the device once. Ids are exact in float64.
        table = torch.cat([ids.double(), logprobs.double(), behavior.double()], 1).cpu().tolist()
        if any(math.isnan(row[1]) for row in table):
            raise EngineError(NON_FINITE_LOGITS)
        return SampledTokens(
            ids=[int(row[0]) for row in table],
            logprobs=[row[1] for row in table],
            behavior_logprobs=[
                row[2] if modified else None for row, modified in zip(table, is_modified, strict=True)
            ],
        )

    def _get_buffers(self, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
        """Return the buffers for logits and weights, whose width is a multiple of BLOCK_SIZE. The logits are
        padded with -inf, which is never sampled."""
        width = -(-vocab // BLOCK_SIZE) * BLOCK_SIZE
        if self._logits.shape[0] < rows or self._logits.shape[1] != width:
            size = (max(rows, self._logits.shape[0]), width)
            self._logits = torch.full(size, -torch.inf, device=self._device)
            self._weights = torch.empty(size, device=self._device)
        return self._logits[:rows], self._weights[:rows]


def _adjust_logits(logits: Tensor, rows: Sequence[int], masks: Masks, penalties: Penalties) -> Tensor:
    """Apply the penalties, and set the logits of the masked tokens to -inf, in place. ``rows`` are the rows
    of the step."""
    for position, row in enumerate(rows):
        if row in penalties:
            penalties[row].apply(logits[position])
        if row in masks:
            forbidden = torch.from_numpy(~masks[row]).to(logits.device)
            logits[position, : len(forbidden)].masked_fill_(forbidden, -torch.inf)
    return logits


def _draw_modified(logits: Tensor, params: list[SamplingParams], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sampled ids and their logprobs. Either all rows are truncated or none is."""
    scaled = logits / torch.tensor([[p.temperature] for p in params], device=logits.device)
    if params[0].is_truncated:
        return _sample_truncated(scaled, params, uniform)
    max_logit, total, ids = _sample_cdf(scaled, torch.empty_like(scaled), uniform)
    return ids, scaled.gather(1, ids) - max_logit - total.log()


def gather_logprobs(logits_N_V: Tensor, ids: Ids) -> Floats:
    index = torch.from_numpy(ids.astype(np.int64))[:, None].to(logits_N_V.device)
    parts: list[Tensor] = []
    for logits, block_index in zip(logits_N_V.split(BLOCK_SIZE), index.split(BLOCK_SIZE), strict=True):
        logits_fp32 = logits.float()
        parts.append(logits_fp32.gather(1, block_index)[:, 0] - logits_fp32.logsumexp(-1))
    logprobs = torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.float32)
    if np.isnan(logprobs).any():
        raise EngineError(NON_FINITE_LOGITS)
    return logprobs


def _sample_cdf(
    logits: Tensor, weights: Tensor, uniform: Tensor, *, skip_sampling: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of exp(logit - largest) and the sampled id of each row, all [rows,
    1]. With ``skip_sampling``, all ids are 0. Summing blocks first is faster than one cumulative sum."""
    max_logit = logits.amax(-1, keepdim=True)
    torch.sub(logits, max_logit, out=weights).exp_()
    blocks = weights.view(len(weights), -1, BLOCK_SIZE)
    sums = blocks.sum(-1).cumsum(-1)
    total = sums[:, -1:].clone()
    if skip_sampling:
        return max_logit, total, torch.zeros_like(total, dtype=torch.long)
    target = _limit_below(uniform * total, total)
    # Clamped because logits may be non-finite. In that case, the caller raises an error for a NaN logprob.
    block = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    block_sums = blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].cumsum(-1)
    target = _limit_below((target - before).clamp(min=0), block_sums[:, -1:])
    offset = torch.searchsorted(block_sums, target, right=True).clamp(max=BLOCK_SIZE - 1)
    return max_logit, total, block * BLOCK_SIZE + offset


def _limit_below(target: Tensor, limit: Tensor) -> Tensor:
    """Clamp the target below the limit, which it may reach by rounding."""
    return torch.minimum(target, torch.nextafter(limit, torch.zeros_like(limit)))


def _sample_truncated(scaled: Tensor, params: list[SamplingParams], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Apply min_p and top_k, then top_p, and return the sampled ids and their logprobs. Of the other tokens,
    top_p keeps the fewest, most likely ones that have at least this fraction of the probability."""
    width = scaled.shape[1]
    top_k = torch.tensor([[p.top_k or width] for p in params], device=scaled.device)
    top_p = torch.tensor([[p.top_p] for p in params], device=scaled.device)
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp()
    if any(p.min_p for p in params):
        weights = weights * (weights >= torch.tensor([[p.min_p] for p in params], device=scaled.device))
    weights = weights * (torch.arange(width, device=scaled.device) < top_k)
    cumulative = weights.cumsum(-1)
    is_in_nucleus = (cumulative - weights < top_p * cumulative[:, -1:]) | (top_p >= 1)
    weights = weights * is_in_nucleus
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].clone()
    target = _limit_below(uniform * total, total)
    rank = torch.searchsorted(cumulative, target, right=True).clamp(max=width - 1)
    return order.gather(1, rank), weights.gather(1, rank).log() - total.log()
