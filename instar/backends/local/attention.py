"""Attention over a packed trie, registered with transformers as ``instar_tree``.

The softmax of every query is combined from blocks of keys, each computed by a dense kernel:

- the *own* block contains the query's node, with a causal mask. Nodes of similar length share a padded call;
- one *cross* block per ancestor contains the queries of all descendants and all keys of the ancestor.

Short ancestors are copied in front of their descendants' own blocks instead. Longer ones are never copied,
and the gradient of their keys is computed in one product. Blocks are combined by their logsumexp. Given the
combined logsumexp and output, the backward pass is a plain sum of the blocks' gradients.

On a GPU, where the many small kernels of these blocks take longer to launch than to run, a row of up to
`MAX_BIAS_TOKENS` tokens is computed by one kernel per layer instead, with the tree as an additive mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from instar.backends.local.pack import IntArray, PackedRow, PackNode
from instar.errors import BackendError

ATTENTION_NAME = "instar_tree"
MAX_MATH_BACKWARD_SCORES = 8 * 1024 * 1024
"""Up to this many scores, a backward pass with plain matrix products beats the flash kernel on a CPU."""
MAX_INLINE_ANCESTOR_TOKENS = 16
"""Ancestors with up to this many tokens are copied instead of computed in a separate call."""
MAX_INLINE_TOKENS = 64
"""The maximum number of tokens copied in front of one node."""
MAX_BIAS_TOKENS = 16_384
"""The length of a row whose mask takes 512 MiB in bf16 and 1 GiB in fp32."""
BIAS_ALIGNMENT = 8
"""The kernel copies a mask whose rows do not start at a multiple of this number of values."""


@dataclass(frozen=True, slots=True)
class OwnBlocks:
    """The own blocks of nodes of similar length, padded with the last token of the node."""

    rows: Tensor
    """[N, L] positions in the packed row, copied ancestors first."""
    queries: Tensor
    """Indices of the nodes' own tokens in the flattened batch."""
    targets: Tensor
    """The positions of ``queries`` in the packed row."""
    unpadded: Tensor
    """Indices of all non-padding tokens in the flattened batch."""


@dataclass(frozen=True, slots=True)
class CrossBlock:
    queries: slice
    keys: slice


@dataclass(slots=True)
class TreeAttentionPlan:
    own: list[OwnBlocks]
    cross: list[CrossBlock]
    bias: Tensor | None = None
    """0 where a token (row) attends to another (column), else -inf. If set, it replaces the blocks."""
    calls: int = 0
    """The number of `tree_attention` calls with this plan, which must equal the number of layers."""


def make_attention_plan(pack: PackedRow, device: str, dtype: torch.dtype) -> TreeAttentionPlan:
    """Return the plan for a row. ``dtype`` is that of the queries, keys and values."""
    if device != "cpu" and len(pack) <= MAX_BIAS_TOKENS:
        return TreeAttentionPlan([], [], make_tree_bias(pack, device, dtype))
    return TreeAttentionPlan(*_make_blocks(pack, device))


def make_tree_bias(pack: PackedRow, device: str, dtype: torch.dtype) -> Tensor:
    """Return the mask [T, T] of a row. Because of the depth-first order, a token sees the tokens before it
    whose node's subtree includes it."""
    length = len(pack)
    subtree_ends = np.repeat([node.subtree_end for node in pack.nodes], [len(node) for node in pack.nodes])
    rows = torch.arange(length, device=device).unsqueeze(1)
    is_visible = (rows >= rows.T) & (rows < torch.from_numpy(subtree_ends).to(device))
    aligned_length = -(-length // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    bias = torch.zeros(length, aligned_length, dtype=dtype, device=device)[:, :length]
    return bias.masked_fill_(~is_visible, float("-inf"))


def _make_blocks(pack: PackedRow, device: str) -> tuple[list[OwnBlocks], list[CrossBlock]]:
    inline = _select_inline_ancestors(pack.nodes)
    copied = {ancestor for ancestors in inline for ancestor in ancestors}
    cross = [
        CrossBlock(slice(node.end, node.subtree_end), slice(node.start, node.end))
        for index, node in enumerate(pack.nodes)
        if node.subtree_end > node.end and index not in copied
    ]
    prefixes = [_concat_positions([pack.nodes[a] for a in ancestors]) for ancestors in inline]
    lengths = [len(prefixes[i]) + len(node) for i, node in enumerate(pack.nodes)]
    own = [
        _make_own_blocks([prefixes[i] for i in members], [pack.nodes[i] for i in members], device)
        for members in _group_by_length(lengths)
    ]
    return own, cross


def _select_inline_ancestors(nodes: Sequence[PackNode]) -> list[list[int]]:
    """Return the indices of the ancestors to copy in front of each node. An ancestor is copied for all of its
    descendants or for none."""
    inline: list[list[int]] = []
    for node in nodes:
        if node.parent is None:
            inline.append([])
            continue
        ancestors, parent = inline[node.parent], nodes[node.parent]
        remaining_tokens = MAX_INLINE_TOKENS - sum(len(nodes[a]) for a in ancestors)
        is_short = len(parent) <= min(MAX_INLINE_ANCESTOR_TOKENS, remaining_tokens)
        inline.append([*ancestors, node.parent] if is_short else ancestors)
    return inline


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group node indices by length. In a group, the shortest is at least about 3/4 of the longest."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] * 4 >= longest * 3 - 16:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def _concat_positions(nodes: Sequence[PackNode]) -> IntArray:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(n.start, n.end) for n in nodes)])


def _make_own_blocks(prefixes: Sequence[IntArray], nodes: Sequence[PackNode], device: str) -> OwnBlocks:
    longest = max(len(prefix) + len(node) for prefix, node in zip(prefixes, nodes, strict=True))
    rows = np.empty((len(nodes), longest), np.int64)
    queries: list[IntArray] = []
    unpadded: list[IntArray] = []
    for i, (prefix, node) in enumerate(zip(prefixes, nodes, strict=True)):
        length = len(prefix) + len(node)
        rows[i, : len(prefix)] = prefix
        rows[i, len(prefix) : length] = np.arange(node.start, node.end)
        rows[i, length:] = node.end - 1
        queries.append(np.arange(i * longest + len(prefix), i * longest + length))
        unpadded.append(np.arange(i * longest, i * longest + length))
    flat_queries = np.concatenate(queries)
    return OwnBlocks(
        rows=torch.from_numpy(rows).to(device),
        queries=torch.from_numpy(flat_queries).to(device),
        targets=torch.from_numpy(rows.reshape(-1)[flat_queries]).to(device),
        unpadded=torch.from_numpy(np.concatenate(unpadded)).to(device),
    )


class _TreeAttention(torch.autograd.Function):
    """The attention of a packed row, from q [T, H, D] and k, v [T, K, D] to [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: TreeAttentionPlan, scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for block in plan.own:
            part, part_lse = block_forward(*_gather_batch(block, q, k, v), is_causal=True, scale=scale)
            out[block.targets] = part.transpose(1, 2).flatten(0, 1)[block.queries].float()
            lse[block.targets] = part_lse.transpose(1, 2).flatten(0, 1)[block.queries]
        for block in plan.cross:
            part, part_lse = block_forward(
                _take_rows(q, block.queries),
                _take_rows(k, block.keys),
                _take_rows(v, block.keys),
                is_causal=False,
                scale=scale,
            )
            _add_block(
                out[block.queries], lse[block.queries], part[0].transpose(0, 1), part_lse[0].transpose(0, 1)
            )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0]
        # The sums are in fp32, because shared keys accumulate the gradients of all descendants.
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        for block in ctx.plan.own:
            rows = block.rows
            block_grad = grad.new_zeros((rows.numel(), *grad.shape[1:]))
            block_grad[block.queries] = grad[block.targets]
            parts = block_backward(
                block_grad.view(*rows.shape, *grad.shape[1:]).transpose(1, 2),
                *_gather_batch(block, q, k, v),
                out[rows].transpose(1, 2),
                lse[rows].transpose(1, 2),
                is_causal=True,
                scale=ctx.scale,
            )
            dq[block.targets] = parts[0].transpose(1, 2).flatten(0, 1)[block.queries].float()
            positions = rows.flatten()[block.unpadded]
            for total, part in zip((dk, dv), parts[1:], strict=True):
                total.index_add_(0, positions, part.transpose(1, 2).flatten(0, 1)[block.unpadded].float())
        for block in ctx.plan.cross:
            parts = block_backward(
                _take_rows(grad, block.queries),
                _take_rows(q, block.queries),
                _take_rows(k, block.keys),
                _take_rows(v, block.keys),
                _take_rows(out, block.queries),
                lse[block.queries].transpose(0, 1).unsqueeze(0),
                is_causal=False,
                scale=ctx.scale,
            )
            dq[block.queries] += parts[0][0].transpose(0, 1)
            dk[block.keys] += parts[1][0].transpose(0, 1)
            dv[block.keys] += parts[2][0].transpose(0, 1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _add_block(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    joint_lse = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - joint_lse)
    out.mul_(torch.exp(lse - joint_lse).unsqueeze(-1)).addcmul_(part.float(), weight.unsqueeze(-1))
    lse.copy_(joint_lse)


def _gather_batch(block: OwnBlocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = block.rows
    return q[rows].transpose(1, 2), k[rows].transpose(1, 2), v[rows].transpose(1, 2)


def _take_rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows].transpose(0, 1).unsqueeze(0)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree_plan: TreeAttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one attention layer for transformers, from query [1, H, T, D] and key, value [1, K, T, D]."""
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise BackendError(f"Its attention uses {name}, which the local backend does not support")
    if tree_plan is None:
        raise BackendError(
            f"{type(module).__name__} does not get the keyword arguments that are passed to the model"
        )
    tree_plan.calls += 1
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    value_dim = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - value_dim))  # the kernels need one dimension
    if tree_plan.bias is not None:
        groups = query.shape[1] // key.shape[1]  # the kernel needs one key head per query head
        k, v = (x.to(dtype).repeat_interleave(groups, 1) for x in (key, value))
        out = scaled_dot_product_attention(query.to(dtype), k, v, attn_mask=tree_plan.bias, scale=scale)
        return out.transpose(1, 2)[..., :value_dim], None
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    out = cast(Tensor, _TreeAttention.apply(q, k, v, tree_plan, scale))
    return out[..., :value_dim].unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, tree_attention)


# --- dense kernels ---
# Each computes one block. q, grad and out are [N, H, L, D]; k and v are [N, K, S, D] with H a multiple of K;
# lse is [N, H, L] in fp32. In the backward pass, lse and out are those of the complete softmax.


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
    return math_forward(q, k, v, is_causal, scale)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if q.device.type == "cpu" and scores > MAX_MATH_BACKWARD_SCORES:
        return cpu_flash_backward(grad, q, k, v, out, lse, is_causal, scale)
    return math_backward(grad, q, k, v, out, lse, is_causal, scale)


def cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
    )


def _compute_scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return the scores [N, K, G·L, S] in fp32. ``q`` is folded: G query heads share each of K key heads."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if is_causal:
        length, groups = k.shape[2], q.shape[2] // k.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores.view(*scores.shape[:2], groups, length, length).masked_fill_(future, float("-inf"))
    return scores


def _fold_heads(x: Tensor, kv_heads: int) -> Tensor:
    # Rows of the query heads that share a key head are next to each other, so that no keys are copied.
    n, heads, length = x.shape[:3]
    return x.reshape(n, kv_heads, heads // kv_heads * length, *x.shape[3:])


def math_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _compute_scores(_fold_heads(q, k.shape[1]), k, is_causal, scale)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    out = scores.sub_(lse).exp_().to(v.dtype) @ v
    return out.view(q.shape), lse.view(q.shape[:3])


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k.shape[1]
    folded_q, folded_grad, folded_out, folded_lse = (_fold_heads(x, kv_heads) for x in (q, grad, out, lse))
    weights = _compute_scores(folded_q, k, is_causal, scale).sub_(folded_lse.unsqueeze(-1)).exp_()
    dv = weights.to(v.dtype).transpose(-1, -2) @ folded_grad
    delta = (folded_grad * folded_out).sum(-1, keepdim=True, dtype=torch.float32)
    dscores = (folded_grad @ v.transpose(-1, -2)).float().sub_(delta)
    dscores = dscores.mul_(weights).mul_(scale).to(q.dtype)
    dq = dscores @ k
    dk = dscores.transpose(-1, -2) @ folded_q
    return dq.view(q.shape), dk, dv
