"""Attention over a packed ragged batch, plugged into transformers models by name.

One forward pass runs over [1, T] tokens: one token of every decoding row, then parts of prompts. The linear
layers see exactly T tokens. This function is called once per layer with the step's plan; it writes the new
keys and values into the rows and attends within each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from instar.errors import EngineError

NAME = "instar_engine"


@dataclass(slots=True)
class DecodeBlock:
    """Adjacent rows that decode together. Each row has one query token, and keys up to ``length``."""

    start: int
    stop: int
    length: int
    mask: Tensor
    """[rows, 1, 1, length], added to scores: 0 for visible keys, -inf for others. A boolean mask would be
    converted to this in every layer."""


@dataclass(slots=True)
class PrefillPiece:
    """The next piece of the prompt in ``row``. It consists of the tokens ``start:stop`` of the step."""

    start: int
    stop: int
    row: int
    length: int
    """The number of keys in the row after the piece is written."""
    mask: Tensor | None
    """Boolean [piece, length]; None for plain causal attention, when the piece is the first of its row."""


@dataclass(slots=True)
class SharedPrefix:
    """A prefix that several rows have in common. The keys of the row ``source`` are used for all of them."""

    rows: Tensor
    source: int


@dataclass(slots=True)
class StepPlan:
    kv: Tensor
    """[layers, 2, rows, kv heads, capacity, head dim]"""
    rows: Tensor
    """[T] row of every token."""
    positions: Tensor
    """[T] position of every token in its row."""
    decoding: int
    """The number of decoding rows. The step begins with one token of each, in the order of the rows."""
    blocks: list[DecodeBlock] = field(default_factory=list[DecodeBlock])
    shared_length: int = 0
    """The number of keys at the beginning of every decoding row that are covered by `prefixes`. The decode
    blocks cover the remaining keys."""
    prefixes: list[SharedPrefix] = field(default_factory=list[SharedPrefix])
    pieces: list[PrefillPiece] = field(default_factory=list[PrefillPiece])


@dataclass(slots=True)
class ShapeProbe:
    """A stand-in for the plan while the model is loaded. It records the shape of keys and values."""

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
    """Return the attention output [1, T, heads, head dim] for query [1, heads, T, head dim] and key and value
    [1, kv heads, T, head dim]."""
    if isinstance(instar_plan, ShapeProbe):
        return _probe(module, query, key, value, instar_plan, kwargs), None
    assert instar_plan is not None, "the model does not pass its keyword arguments to attention"
    plan = instar_plan
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType] # set by every transformers attention
    keys, values = plan.kv[layer, 0], plan.kv[layer, 1]
    keys[plan.rows, :, plan.positions] = key[0].transpose(0, 1)
    values[plan.rows, :, plan.positions] = value[0].transpose(0, 1)
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    query = query[0].view(kv_heads, heads // kv_heads, -1, head_dim)

    outputs: list[Tensor] = []
    if plan.prefixes:
        outputs.append(_attend_shared(plan, query, keys, values, scaling or head_dim**-0.5))
    for block in plan.blocks if not plan.prefixes else ():
        # The heads that share keys are moved to the query-length axis, so that keys are read once and not
        # copied.
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
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def can_share_prefixes(device: str) -> bool:
    """Return True if attention can be split by keys. That requires a kernel that returns its log-sum-exp. On
    a GPU the plain kernels are fast enough, so the result is False."""
    return device == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def _attend_shared(plan: StepPlan, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Return the attention output of the decoding rows [rows, heads, head dim] for query [kv heads, heads per
    kv head, T, head dim]. The shared prefix takes one matrix product for all rows and the remaining keys one
    per row; the two parts are joined by their log-sum-exps."""
    rows, kv_heads, head_dim = plan.decoding, query.shape[0], query.shape[3]
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
    for part in plan.prefixes:
        # [kv heads, rows × heads per kv head, head dim]
        shared_query = query_R[part.rows].transpose(0, 1).reshape(kv_heads, -1, head_dim).float()
        scores = torch.baddbmm(
            shared_query.new_empty(()),
            shared_query,
            keys[part.source, :, : plan.shared_length].float().transpose(1, 2),
            beta=0,
            alpha=scaling,
        )
        lse = scores.logsumexp(-1, keepdim=True)
        shared_output = torch.bmm(
            scores.sub_(lse).exp_(), values[part.source, :, : plan.shared_length].float()
        )
        shape = (kv_heads, len(part.rows), -1, head_dim)
        lse = lse.view(*shape[:3]).transpose(0, 1)
        # The share of the softmax that falls on the shared keys.
        share = torch.sigmoid(lse - lse_R[part.rows])[..., None]
        output_R[part.rows] = output_R[part.rows].lerp_(shared_output.view(shape).transpose(0, 1), share)
    return output_R.to(query.dtype).reshape(rows, -1, head_dim)


def _probe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, probe: ShapeProbe, kwargs: dict[str, Any]
) -> Tensor:
    for name in ("sliding_window", "softcap", "s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise EngineError(
                f"The local engine does not implement this model's attention, which uses {name}."
            )
    if key.shape != value.shape:
        raise EngineError("The local engine needs keys and values of the same shape.")
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType] # set by every transformers attention
    probe.shapes[layer] = (key.shape[1], key.shape[3])
    return torch.zeros_like(query).transpose(1, 2)


AttentionInterface.register(NAME, attend)
