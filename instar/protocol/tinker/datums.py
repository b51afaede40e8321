"""Converts Tinker's datums to samples.

A datum has inputs ``x[0..n)`` and a target for each of them. We compute next-token logprobs, so a target must
be the input that follows: ``target[i] == x[i+1]``; only the last one is free. The sample is then
``x + [target[n-1]]``, and entry ``i`` of a datum's tensors applies to the sample's token ``i + 1``. Every
token is trained, so that every logprob is returned; one whose weight or advantage is 0 adds nothing.

Two kinds of tokens are masked, and their logprob is returned as NaN: tokens of weight or advantage 0 whose
target is not the next input (programs put fillers there), and tokens of advantage 0 whose old logprob is NaN.
`dro` pulls towards the old logprobs whatever the advantage is, so it accepts no filler targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.protocol.base import ProtocolError
from instar.types import NOT_SAMPLED, Floats, Ids, Sample

Array = NDArray[Any]

_POLICY_GRADIENT = ("target_tokens", "logprobs", "advantages")
LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": _POLICY_GRADIENT,
    "ppo": _POLICY_GRADIENT,
    "cispo": _POLICY_GRADIENT,
    "dro": _POLICY_GRADIENT,
}
"""The losses and the tensors that each accepts."""
_OPTIONAL = frozenset({"weights"})


@dataclass(frozen=True, slots=True)
class TinkerDatum:
    tokens: Ids
    tensors: dict[str, Array]


def to_samples(datums: Sequence[TinkerDatum], loss: str) -> list[Sample]:
    """Return one sample per datum. Raises ProtocolError, naming the invalid datum."""
    if loss not in LOSSES:
        raise ProtocolError(f"unknown loss {loss!r}; supported: {', '.join(LOSSES)}")
    if not datums:
        raise ProtocolError("data is empty; send at least one datum")
    return [_to_sample(f"datum {index}", datum, loss) for index, datum in enumerate(datums)]


def _to_sample(name: str, datum: TinkerDatum, loss: str) -> Sample:
    count = len(datum.tokens)
    if count == 0:
        raise ProtocolError(f"{name}: model_input has no tokens")
    _check_tensors(name, datum, loss)
    targets = datum.tensors["target_tokens"]
    coefficients = datum.tensors.get("weights" if loss == "cross_entropy" else "advantages")
    mask = np.ones(count + 1, np.float32)
    mask[0] = 0
    _mask_fillers(name, datum, loss, coefficients, mask)
    token_ids = np.empty(count + 1, np.int32)
    token_ids[:-1] = datum.tokens
    token_ids[-1] = _last_target(name, targets)
    old_logprobs = datum.tensors.get("logprobs")
    if old_logprobs is not None and coefficients is not None:
        mask[1:][np.isnan(old_logprobs) & (coefficients == 0)] = 0
    return Sample(
        sample_key=name,
        session_id="",
        token_ids=token_ids,
        mask=mask,
        logprobs=_shift(old_logprobs, count, first=np.nan, default=np.nan),
        advantages=_shift(coefficients, count, first=0.0, default=1.0),
        versions=np.full(count + 1, NOT_SAMPLED, np.int32),
    )


def _check_tensors(name: str, datum: TinkerDatum, loss: str) -> None:
    accepted = LOSSES[loss]
    if unknown := sorted(datum.tensors.keys() - accepted):
        raise ProtocolError(
            f"{name}: {loss} takes {', '.join(accepted)} in loss_fn_inputs, but not {', '.join(unknown)}"
        )
    for key in accepted:
        tensor = datum.tensors.get(key)
        if tensor is None:
            if key in _OPTIONAL:
                continue
            raise ProtocolError(f"{name}: loss_fn_inputs.{key} is missing; {loss} requires it")
        if len(tensor) != len(datum.tokens):
            raise ProtocolError(f"{name}: {key} has {len(tensor)} entries for {len(datum.tokens)} tokens")
        if (key == "target_tokens") != (tensor.dtype.kind == "i"):
            expected = "integers" if key == "target_tokens" else "floats"
            raise ProtocolError(f"{name}: {key} has dtype {tensor.dtype}; it must hold {expected}")


def _mask_fillers(name: str, datum: TinkerDatum, loss: str, coefficients: Array | None, mask: Floats) -> None:
    targets = datum.tensors["target_tokens"]
    differing = np.flatnonzero(targets[:-1] != datum.tokens[1:])
    if len(differing) == 0:
        return
    invalid = differing
    if loss != "dro" and coefficients is not None:
        invalid = differing[coefficients[differing] != 0]
    if len(invalid):
        index = int(invalid[0])
        raise ProtocolError(
            f"{name}: target_tokens[{index}] is {int(targets[index])}, but the next input token is "
            f"{int(datum.tokens[index + 1])}; each target must be the next input token"
        )
    mask[differing + 1] = 0


def _last_target(name: str, targets: Array) -> int:
    """Return the last target. It is not confirmed by any input, and would be truncated to 32 bits, so it is
    checked here."""
    last = int(targets[-1])
    if not 0 <= last < 1 << 31:
        raise ProtocolError(f"{name}: target_tokens[{len(targets) - 1}] is {last}, which is not a token id")
    return last


def _shift(values: Array | None, count: int, *, first: float, default: float) -> Floats:
    """Return the values shifted by one, so that index i describes token i of the sample."""
    shifted = np.empty(count + 1, np.float32)
    shifted[0] = first
    shifted[1:] = default if values is None else values
    return shifted
