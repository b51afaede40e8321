"""Vectorized sampling for all rows of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from instar.errors import EngineError
from instar.types import Floats, Ids, SamplingParams

BLOCK = 128


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step, one entry per row. ``behavior`` is None for rows sampled from the full
    softmax at temperature 1."""

    ids: list[int]
    logprobs: list[float]
    behavior: list[float | None]


class Sampler:
    """Samples one token per row from logits. The large buffers are reused, because page faults of new ones
    would cost more than the arithmetic."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._logits = torch.empty(0, 0)
        self._weights = torch.empty(0, 0)

    def draw(
        self, logits_N_V: Tensor, params: Sequence[SamplingParams], rngs: Sequence[Random]
    ) -> SampledTokens:
        rows, vocab = logits_N_V.shape
        logits, weights = self._buffers(rows, vocab)
        logits[:, :vocab].copy_(logits_N_V)
        greedy = [i for i, p in enumerate(params) if p.temperature == 0]
        uniform = torch.tensor([[r.random()] for r in rngs], dtype=torch.float32).to(self._device)
        top, total, ids = _inverse_cdf(logits, weights, uniform, skip=len(greedy) == rows)
        behavior = torch.full_like(total, torch.nan)
        if greedy:
            index = self._index(greedy, rows)
            ids[index] = logits[index].argmax(-1, keepdim=True)
            behavior[index] = 0.0
        self._draw_tempered(logits, params, uniform, ids, behavior)
        logprobs = logits.gather(1, ids) - top - total.log()
        # One transfer per step, so the step waits for the device only once. Ids are exact in float64.
        drawn = torch.cat([ids.double(), logprobs.double(), behavior.double()], 1).cpu().tolist()
        if any(math.isnan(row[1]) for row in drawn):
            raise EngineError("The model's logits are not finite.")
        return SampledTokens(
            ids=[int(row[0]) for row in drawn],
            logprobs=[row[1] for row in drawn],
            behavior=[
                row[2] if p.modifies_distribution else None for row, p in zip(drawn, params, strict=True)
            ],
        )

    def _draw_tempered(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        uniform: Tensor,
        ids: Tensor,
        behavior: Tensor,
    ) -> None:
        """Replace the samples of rows whose params modify the distribution: first rows with only a
        temperature, then rows with top_k or top_p."""
        tempered = [i for i, p in enumerate(params) if p.temperature > 0 and p.modifies_distribution]
        truncated = [i for i in tempered if params[i].top_p < 1 or params[i].top_k > 0]
        plain = [i for i in tempered if i not in set(truncated)]
        for chosen in (plain, truncated):
            if not chosen:
                continue
            index = torch.tensor(chosen, device=self._device)
            temperature = torch.tensor([[params[i].temperature] for i in chosen], device=self._device)
            scaled = logits[index] / temperature
            if chosen is plain:
                top, total, drawn = _inverse_cdf(scaled, torch.empty_like(scaled), uniform[index])
                logprobs = scaled.gather(1, drawn) - top - total.log()
            else:
                drawn, logprobs = _truncated(scaled, [params[i] for i in chosen], uniform[index])
            ids[index], behavior[index] = drawn, logprobs

    def _index(self, chosen: list[int], rows: int) -> Tensor | slice:
        return slice(None) if len(chosen) == rows else torch.tensor(chosen, device=self._device)

    def _buffers(self, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
        """Return buffers padded to full blocks with -inf, which is never sampled."""
        width = -(-vocab // BLOCK) * BLOCK
        if self._logits.shape[0] < rows or self._logits.shape[1] != width:
            size = (max(rows, self._logits.shape[0]), width)
            self._logits = torch.full(size, -torch.inf, device=self._device)
            self._weights = torch.empty(size, device=self._device)
        return self._logits[:rows], self._weights[:rows]


def gather_logprobs(logits_N_V: Tensor, ids: Ids) -> Floats:
    """Return the logprob of ``ids[i]`` in row i."""
    index = torch.from_numpy(ids.astype(np.int64))[:, None].to(logits_N_V.device)
    parts: list[Tensor] = []
    for logits, chosen in zip(logits_N_V.split(BLOCK), index.split(BLOCK), strict=True):
        wide = logits.float()
        parts.append(wide.gather(1, chosen)[:, 0] - wide.logsumexp(-1))
    logprobs = torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.float32)
    if np.isnan(logprobs).any():
        raise EngineError("The model's logits are not finite.")
    return logprobs


def _inverse_cdf(
    logits: Tensor, weights: Tensor, uniform: Tensor, *, skip: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (largest logit, sum of exp(logit - largest), sampled id), each [rows, 1]. The cumulative sum is
    taken over blocks first and then within the sampled block. With ``skip`` all ids are 0."""
    top = logits.amax(-1, keepdim=True)
    torch.sub(logits, top, out=weights).exp_()
    blocks = weights.view(len(weights), -1, BLOCK)
    sums = blocks.sum(-1).cumsum(-1)
    total = sums[:, -1:].clone()
    if skip:
        return top, total, torch.zeros_like(total, dtype=torch.long)
    target = _below(uniform * total, total)
    # Clamped because logits may not be finite: the caller detects those by their logprob.
    block = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block[:, 0]].cumsum(-1)
    rest = _below((target - before).clamp(min=0), inner[:, -1:])
    return top, total, block * BLOCK + torch.searchsorted(inner, rest, right=True).clamp(max=BLOCK - 1)


def _below(target: Tensor, limit: Tensor) -> Tensor:
    """Return the target, reduced to below the limit: rounding may raise it to the sum, past the last possible
    id."""
    return torch.minimum(target, torch.nextafter(limit, torch.zeros_like(limit)))


def _truncated(scaled: Tensor, params: list[SamplingParams], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and logprobs sampled after top_k and then top_p. top_p keeps the smallest set of the most
    likely tokens whose share of the remaining probability reaches top_p."""
    width = scaled.shape[1]
    top_k = torch.tensor([[p.top_k or width] for p in params], device=scaled.device)
    top_p = torch.tensor([[p.top_p] for p in params], device=scaled.device)
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp()
    weights = weights * (torch.arange(width, device=scaled.device) < top_k)
    cumulative = weights.cumsum(-1)
    kept = (cumulative - weights < top_p * cumulative[:, -1:]) | (top_p >= 1)
    weights = weights * kept
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].clone()
    place = torch.searchsorted(cumulative, _below(uniform * total, total), right=True).clamp(max=width - 1)
    return order.gather(1, place), weights.gather(1, place).log() - total.log()
