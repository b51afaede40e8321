"""Converts Tinker's datums to samples.

A datum has inputs ``x[0..n)`` and one target for each input. The server computes next-token logprobs, so each
target except the last must be the next input: ``target[i] == x[i+1]``. The sample is ``x + [target[n-1]]``,
and entry ``i`` of a datum's tensors applies to token ``i + 1`` of the sample. All targets are in the loss
mask, so that all logprobs are returned. Targets with weight or advantage 0 affect the gradient only in `dro`.

Two kinds of targets are masked out, and their logprobs are returned as NaN: fillers (targets that are not the
next input) with weight or advantage 0, and targets with advantage 0 whose old logprob is NaN. `dro` rejects
fillers, because its regularization does not depend on the advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.protocol.base import ProtocolError
from instar.protocol.wire import build_sample
from instar.types import Floats, Ids, Sample

Array = NDArray[Any]

_POLICY_GRADIENT_TENSORS = ("target_tokens", "logprobs", "advantages")
LOSS_TENSORS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": _POLICY_GRADIENT_TENSORS,
    "ppo": _POLICY_GRADIENT_TENSORS,
    "cispo": _POLICY_GRADIENT_TENSORS,
    "dro": _POLICY_GRADIENT_TENSORS,
}
"""The tensors that each loss accepts. All except ``weights`` are required."""


@dataclass(frozen=True, slots=True)
class TinkerDatum:
    tokens: Ids
    tensors: dict[str, Array]


def to_samples(datums: Sequence[TinkerDatum], loss: str) -> list[Sample]:
    """Return one sample per datum. Raises ProtocolError if the loss or a datum is invalid."""
    if loss not in LOSS_TENSORS:
        raise ProtocolError(f"unknown loss_fn {loss!r}; supported: {', '.join(LOSS_TENSORS)}")
    if not datums:
        raise ProtocolError("data is empty; send at least one datum")
    return [_to_sample(f"datum {index}", datum, loss) for index, datum in enumerate(datums)]


def _to_sample(name: str, datum: TinkerDatum, loss: str) -> Sample:
    count = len(datum.tokens)
    if count == 0:
        raise ProtocolError(f"{name}: model_input has no tokens; send at least one")
    _check_tensors(name, datum, loss)
    last_target = int(datum.tensors["target_tokens"][-1])
    # The last target is not compared with an input, so check that it fits into int32.
    if not 0 <= last_target < 1 << 31:
        raise ProtocolError(f"{name}: target_tokens[{count - 1}] must be a token id, got {last_target}")
    coefficients = datum.tensors.get("weights" if loss == "cross_entropy" else "advantages")
    mask = np.ones(count, np.float32)
    _mask_fillers(name, datum, loss, coefficients, mask)
    old_logprobs = datum.tensors.get("logprobs", np.full(count, np.nan, np.float32))
    if loss != "cross_entropy" and coefficients is not None:
        mask[np.isnan(old_logprobs) & (coefficients == 0)] = 0
    advantages = np.ones(count) if coefficients is None else coefficients
    token_ids = np.append(datum.tokens, last_target).astype(np.int32)
    return build_sample(name, token_ids, mask=mask, logprobs=old_logprobs, advantages=advantages)


def _check_tensors(name: str, datum: TinkerDatum, loss: str) -> None:
    accepted = LOSS_TENSORS[loss]
    if unknown := sorted(datum.tensors.keys() - accepted):
        raise ProtocolError(
            f"{name}: unknown loss_fn_inputs {', '.join(unknown)}; {loss} supports {', '.join(accepted)}"
        )
    for key in accepted:
        tensor = datum.tensors.get(key)
        if tensor is None:
            if key == "weights":
                continue
            raise ProtocolError(f"{name}: loss_fn_inputs.{key} is missing; {loss} requires it")
        if len(tensor) != len(datum.tokens):
            raise ProtocolError(f"{name}: {key} has {len(tensor)} entries, expected {len(datum.tokens)}")
        if (key == "target_tokens") != (tensor.dtype.kind == "i"):
            expected = "integers" if key == "target_tokens" else "floats"
            raise ProtocolError(f"{name}: {key} must contain {expected}, but its dtype is {tensor.dtype}")


def _mask_fillers(name: str, datum: TinkerDatum, loss: str, coefficients: Array | None, mask: Floats) -> None:
    """Set the mask of fillers to 0. Raises ProtocolError for a filler that would affect the loss."""
    targets = datum.tensors["target_tokens"]
    invalid = fillers = np.flatnonzero(targets[:-1] != datum.tokens[1:])
    if loss != "dro" and coefficients is not None:
        invalid = fillers[coefficients[fillers] != 0]
    if len(invalid):
        index = int(invalid[0])
        condition = "" if loss == "dro" else ", unless its weight or advantage is 0"
        raise ProtocolError(
            f"{name}: target_tokens[{index}] is {int(targets[index])}, but the next input token is "
            f"{int(datum.tokens[index + 1])}; each target must be the next input token{condition}"
        )
    mask[fillers] = 0
