"""The local engine's attention function, registered with transformers as `instar_engine`.

A step runs the model on [1, T] tokens: one token of every decoding row, then pieces of prompts. Each layer
calls ``attend`` with the step's plan. ``attend`` writes the new keys and values to the rows of the KV cache,
and attends within each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from instar.engines.local.kv_cache import CAPACITY_STEP
from instar.errors import EngineError

NAME = "instar_engine"
MIN_GEMM_ROWS = 16
"""On one thread, CPU kernels compute each row of a matrix product in the same way if the matrix has at least
this many. In bf16, this holds for several threads too. With AVX-512, fp32 products of fewer rows depend on
their number."""


@dataclass(slots=True)
class DecodeBlock:
    """Adjacent rows that decode together, each with one query token and at most ``length`` keys."""

    start: int
    stop: int
    length: int
    mask: Tensor
    """[rows, 1, 1, length]: 0 for visible keys, else -inf. torch would convert booleans in every layer."""


@dataclass(slots=True)
class PrefillPiece:
    """The tokens ``start:stop`` of the step, which are a piece of the prompt in ``row``."""

    start: int
    stop: int
    row: int
    length: int
    """The number of keys in the row, including the keys of this piece."""
    mask: Tensor | None
    """Boolean [piece tokens, length]. None if the row has no earlier keys, so torch's causal mask is used."""


@dataclass(slots=True)
class SharedPrefix:
    """A prefix that ``rows`` have in common. Its keys and values are read from row ``source``."""

    rows: Tensor
    source: int


@dataclass(slots=True)
class StepPlan:
    kv: Tensor
    """[layers, 2, rows, kv heads, capacity, head dim]"""
    rows: Tensor
    """[T] the row of every token."""
    positions: Tensor
    """[T] the position of every token in its row."""
    decoding_rows: int
    """The number of decoding rows. The step begins with one token from each."""
    blocks: list[DecodeBlock] = field(default_factory=list[DecodeBlock])
    shared_length: int = 0
    """The length of each prefix in ``prefixes``. The blocks are used only for the keys after it."""
    prefixes: list[SharedPrefix] = field(default_factory=list[SharedPrefix])
    pieces: list[PrefillPiece] = field(default_factory=list[PrefillPiece])
    is_batch_invariant: bool = False
    """True if the result for a token must not depend on the other tokens in the step. Then there are no
    blocks and prefixes, and after the plan's tokens there may be others that only fill up the batch."""


@dataclass(slots=True)
class ShapeProbe:
    """Replaces the plan in a trial forward pass. Each layer stores its (kv heads, head dim)."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    instar_plan: StepPlan | ShapeProbe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the keys and values to the plan's rows, and return the output [1, T, heads, head dim] for query
    [1, heads, T, head dim]. With a ShapeProbe, only record the shapes and return zeros."""
    if isinstance(instar_plan, ShapeProbe):
        return _record_shape(module, query, key, value, instar_plan, kwargs), None
    if instar_plan is None:
        raise EngineError("The model does not pass keyword arguments to its attention")
    plan = instar_plan
    value_dim = value.shape[3]
    if value_dim < key.shape[3]:  # the cache has one shape
        value = F.pad(value, (0, key.shape[3] - value_dim))
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType] # set by every transformers attention
    keys, values = plan.kv[layer, 0], plan.kv[layer, 1]
    keys[plan.rows, :, plan.positions] = key[0, :, : len(plan.rows)].transpose(0, 1)
    values[plan.rows, :, plan.positions] = value[0, :, : len(plan.rows)].transpose(0, 1)
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    query = query[0].view(kv_heads, heads // kv_heads, -1, head_dim)

    if plan.is_batch_invariant:
        output = _attend_invariant(plan, query.float(), keys, values, scaling or head_dim**-0.5)
        return output[..., :value_dim].to(value.dtype).unsqueeze(0), None
    outputs: list[Tensor] = []
    if plan.prefixes:
        outputs.append(_attend_shared(plan, query, keys, values, scaling or head_dim**-0.5))
    for block in plan.blocks if not plan.prefixes else ():
        # Heads that share keys are moved to the query token axis, so that the keys are not copied.
        attended = F.scaled_dot_product_attention(
            query[:, :, block.start : block.stop].permute(2, 0, 1, 3),
            keys[block.start : block.stop, :, : block.length],
            values[block.start : block.stop, :, : block.length],
            attn_mask=block.mask,
            scale=scaling,
        )
        outputs.append(attended.reshape(block.stop - block.start, heads, head_dim))
    for piece in plan.pieces:
        shape = (kv_heads, heads // kv_heads, piece.length, head_dim)
        attended = F.scaled_dot_product_attention(
            query[:, :, piece.start : piece.stop],
            keys[piece.row, :, None, : piece.length].expand(shape),
            values[piece.row, :, None, : piece.length].expand(shape),
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
            scale=scaling,
        )
        outputs.append(attended.permute(2, 0, 1, 3).reshape(piece.stop - piece.start, heads, head_dim))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[..., :value_dim].unsqueeze(0), None


def _attend_shared(plan: StepPlan, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Return the attention output of the decoding rows [rows, heads, head dim] for query [kv heads, heads per
    kv head, T, head dim]. Attention to a shared prefix is one matrix product for all of its rows. The result
    is combined with the attention to later keys by their logsumexps."""
    rows, kv_heads, head_dim = plan.decoding_rows, query.shape[0], query.shape[3]
    query_R = query[:, :, :rows].permute(2, 0, 1, 3)
    output_R = torch.empty(query_R.shape, dtype=torch.float32)
    lse_R = torch.empty(query_R.shape[:3], dtype=torch.float32)
    for block in plan.blocks:
        output_R[block.start : block.stop], lse_R[block.start : block.stop] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_R[block.start : block.stop],
                keys[block.start : block.stop, :, plan.shared_length : block.length],
                values[block.start : block.stop, :, plan.shared_length : block.length],
                attn_mask=block.mask[..., plan.shared_length :],
                scale=scaling,
            )
        )
    for prefix in plan.prefixes:
        # [kv heads, rows × heads per kv head, head dim]
        shared_query = query_R[prefix.rows].transpose(0, 1).reshape(kv_heads, -1, head_dim).float()
        scores = torch.baddbmm(
            shared_query.new_empty(()),
            shared_query,
            keys[prefix.source, :, : plan.shared_length].float().transpose(1, 2),
            beta=0,
            alpha=scaling,
        )
        lse = scores.logsumexp(-1, keepdim=True)
        shared_output = torch.bmm(
            scores.sub_(lse).exp_(), values[prefix.source, :, : plan.shared_length].float()
        )
        shape = (kv_heads, len(prefix.rows), -1, head_dim)
        lse = lse.view(*shape[:3]).transpose(0, 1)
        # The softmax weight of the shared keys.
        weight = torch.sigmoid(lse - lse_R[prefix.rows])[..., None]
        output_R[prefix.rows] = output_R[prefix.rows].lerp_(shared_output.view(shape).transpose(0, 1), weight)
    return output_R.to(query.dtype).reshape(rows, -1, head_dim)


def _attend_invariant(plan: StepPlan, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Return the attention output of all tokens [T, heads, head dim] for query [kv heads, heads per kv head,
    T, head dim]. Every product has the same shape except for the number of its rows and matrices, and the
    order of every sum depends only on the token's position."""
    kv_heads, group, tokens, head_dim = query.shape
    output = query.new_zeros(tokens, kv_heads, group, head_dim)
    decoding = plan.decoding_rows
    if decoding:
        attended = _attend_in_chunks(
            query[:, :, :decoding].permute(2, 0, 1, 3),
            keys[:decoding],
            values[:decoding],
            plan.positions[:decoding, None, None, None],
            scaling,
        )
        output[:decoding] = attended
    for piece in plan.pieces:
        count = piece.stop - piece.start
        attended = _attend_in_chunks(
            query[None, :, :, piece.start : piece.stop].reshape(1, kv_heads, group * count, head_dim),
            keys[piece.row : piece.row + 1],
            values[piece.row : piece.row + 1],
            plan.positions[piece.start : piece.stop].repeat(group)[:, None],
            scaling,
        )
        output[piece.start : piece.stop] = attended.view(kv_heads, group, count, head_dim).permute(2, 0, 1, 3)
    return output.view(tokens, kv_heads * group, head_dim)


def _attend_in_chunks(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float
) -> Tensor:
    """Return the attention output of ``query`` [rows, kv heads, queries, head dim] to the keys up to
    ``positions``, which can be broadcast to [rows, kv heads, queries, keys]."""
    count = query.shape[2]
    padded = F.pad(query, (0, 0, 0, max(0, MIN_GEMM_ROWS - count)))
    length = (int(positions.max()) // CAPACITY_STEP + 1) * CAPACITY_STEP
    chunks = [slice(start, start + CAPACITY_STEP) for start in range(0, length, CAPACITY_STEP)]
    scores = torch.cat([padded @ keys[:, :, chunk].float().transpose(2, 3) for chunk in chunks], -1)
    scores = scores[:, :, :count] * scaling
    is_hidden = torch.arange(length, device=query.device) > positions
    weights = scores.masked_fill_(is_hidden, -torch.inf).softmax(-1)
    weights = F.pad(weights, (0, 0, 0, max(0, MIN_GEMM_ROWS - count)))
    output = torch.zeros_like(padded)
    for chunk in chunks:
        output += weights[..., chunk] @ values[:, :, chunk].float()
    return output[:, :, :count]


def _record_shape(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, probe: ShapeProbe, kwargs: dict[str, Any]
) -> Tensor:
    for name in ("sliding_window", "softcap", "s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise EngineError(
                f"Its attention uses {name}, but the local engine supports only plain causal attention"
            )
    if key.shape[:3] != value.shape[:3] or key.shape[3] < value.shape[3]:
        shapes = f"{tuple(key.shape)} and {tuple(value.shape)}"
        raise EngineError(f"The local engine does not support keys and values of the shapes {shapes}")
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType] # set by every transformers attention
    probe.shapes[layer] = (key.shape[1], key.shape[3])
    return torch.zeros_like(query[..., : value.shape[3]]).transpose(1, 2)


AttentionInterface.register(NAME, attend)
