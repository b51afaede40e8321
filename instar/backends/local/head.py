"""Compute the logprobs of target tokens from hidden states, without storing all logits at the same time."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_ROWS = 256


def target_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the fp32 logprob of each ``targets[i]`` after ``hidden[i]``, which is the target's logit minus
    the logsumexp of its row."""
    if type(head) is nn.Linear and not head.weight.requires_grad:
        return cast(Tensor, _FrozenHead.apply(hidden, targets, head.weight, head.bias))
    chunks = zip(hidden.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_chunk_logprobs(head, rows, ids) for rows, ids in chunks])
    # The chunks use no randomness, and another model may be using torch's generator.
    parts = [
        checkpoint(_chunk_logprobs, head, rows, ids, use_reentrant=False, preserve_rng_state=False)
        for rows, ids in chunks
    ]
    return torch.cat(cast(list[Tensor], parts))


def _chunk_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = cast(Tensor, head(hidden)).float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


class _FrozenHead(torch.autograd.Function):
    """Computes logprobs with a frozen output layer. For every loss, the gradient of a row's logprob with
    respect to its hidden state is W[target] - Σ p·W. It is therefore computed in the forward pass, in which
    the logits are available."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        directions = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = nn.functional.linear(hidden[rows], weight, bias)
            target_logits = logits.gather(-1, targets[rows].unsqueeze(-1)).float()
            top_logits, top_ids = logits.max(-1, keepdim=True)
            probs = torch.softmax(logits, -1, dtype=torch.float32)
            # logsumexp = top - log p[top]. torch's own logsumexp is ten times as slow on a CPU.
            logprobs[rows] = (target_logits - top_logits.float() + probs.gather(-1, top_ids).log()).squeeze(
                -1
            )
            if directions is not None:
                directions[rows] = weight[targets[rows]] - probs.to(weight.dtype) @ weight
        ctx.save_for_backward(directions)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (directions,) = ctx.saved_tensors
        return (directions * grads[0].unsqueeze(-1)).to(directions.dtype), None, None, None
