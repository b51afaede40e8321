"""Compute the dense attention of one block with its logsumexp, and its gradient. The gradient depends on the
logsumexp and output of the complete softmax, of which the block is a part.

q, grad and out are [N, H, L, D]; k and v are [N, K, S, D] with H a multiple of K; lse is [N, H, L] in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_MATH_BACKWARD_SCORES = 8 * 1024 * 1024
"""Up to this number of scores, plain products are faster on a CPU than the backward pass of the flash
kernel."""


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return math_forward(q, k, v, causal, scale)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if q.device.type == "cpu" and scores > MAX_MATH_BACKWARD_SCORES:
        return cpu_flash_backward(grad, q, k, v, out, lse, causal, scale)
    return math_backward(grad, q, k, v, out, lse, causal, scale)


def cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the scores [N, K, G·L, S] in fp32, with the G query heads of each key head in the same rows."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if causal:
        length, groups = k.shape[2], q.shape[2] // k.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores.view(*scores.shape[:2], groups, length, length).masked_fill_(future, float("-inf"))
    return scores


def _fold_heads(x: Tensor, kv_heads: int) -> Tensor:
    # Rows of the query heads that share a key head are next to each other, so that no keys are copied.
    n, heads, length = x.shape[:3]
    return x.reshape(n, kv_heads, heads // kv_heads * length, *x.shape[3:])


def math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(_fold_heads(q, k.shape[1]), k, causal, scale)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    out = scores.sub_(lse).exp_().to(v.dtype) @ v
    return out.view(q.shape), lse.view(q.shape[:3])


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k.shape[1]
    folded_q, folded_grad, folded_out, folded_lse = (_fold_heads(x, kv_heads) for x in (q, grad, out, lse))
    weights = _scores(folded_q, k, causal, scale).sub_(folded_lse.unsqueeze(-1)).exp_()
    dv = weights.to(v.dtype).transpose(-1, -2) @ folded_grad
    delta = (folded_grad * folded_out).sum(-1, keepdim=True, dtype=torch.float32)
    dscores = (folded_grad @ v.transpose(-1, -2)).float().sub_(delta)
    dscores = dscores.mul_(weights).mul_(scale).to(q.dtype)
    dq = dscores @ k
    dk = dscores.transpose(-1, -2) @ folded_q
    return dq.view(q.shape), dk, dv
