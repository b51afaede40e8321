"""From Tinker's datums to samples.

A datum has inputs ``x[0..n)`` and a target for each of them. We compute next-token logprobs, so a target has
to be the input that follows: ``target[i] == x[i+1]``, and the last one is free. A sample is then
``x + [target[n-1]]``, and what a datum says of place ``i`` is said of the sample's token ``i + 1``. Every
place is trained, so that every logprob is returned; one whose weight or advantage is 0 adds nothing.

Two places take no part, and their logprob is returned as NaN: one of weight or advantage 0 whose target is
another token (programs put fillers there), and one of advantage 0 whose old logprob is NaN. `dro` pulls
towards the old logprobs whatever the advantage is, so it takes no filler targets.
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
"""The losses, and the tensors that each takes."""
_OPTIONAL = frozenset({"weights"})


@dataclass(frozen=True, slots=True)
class TinkerDatum:
    """As it came, whatever it came in."""

    tokens: Ids
    tensors: dict[str, Array]


def to_samples(datums: Sequence[TinkerDatum], loss: str) -> list[Sample]:
    """Raises ProtocolError that names the datum."""
    if loss not in LOSSES:
        raise ProtocolError(f"unknown loss {loss!r}; there are {', '.join(LOSSES)}")
    if not datums:
        raise ProtocolError("no data was given")
    return [_to_sample(f"datum {index}", datum, loss) for index, datum in enumerate(datums)]


def _to_sample(name: str, datum: TinkerDatum, loss: str) -> Sample:
    count = len(datum.tokens)
    if count == 0:
        raise ProtocolError(f"{name} has no tokens")
    _check_tensors(name, datum, loss)
    targets = datum.tensors["target_tokens"]
    coefficients = datum.tensors.get("weights" if loss == "cross_entropy" else "advantages")
    mask = np.ones(count + 1, np.float32)
    mask[0] = 0
    _leave_out_fillers(name, datum, loss, coefficients, mask)
    token_ids = np.empty(count + 1, np.int32)
    token_ids[:-1] = datum.tokens
    token_ids[-1] = _last_target(name, targets)
    old = datum.tensors.get("logprobs")
    if old is not None and coefficients is not None:
        mask[1:][np.isnan(old) & (coefficients == 0)] = 0
    return Sample(
        sample_key=name,
        session_id="",
        token_ids=token_ids,
        mask=mask,
        logprobs=_moved(old, count, first=np.nan, default=np.nan),
        advantages=_moved(coefficients, count, first=0.0, default=1.0),
        versions=np.full(count + 1, NOT_SAMPLED, np.int32),
    )


def _check_tensors(name: str, datum: TinkerDatum, loss: str) -> None:
    taken = LOSSES[loss]
    if unknown := sorted(datum.tensors.keys() - taken):
        raise ProtocolError(
            f"{name}: {loss} takes {', '.join(taken)} in loss_fn_inputs, but not {', '.join(unknown)}"
        )
    for key in taken:
        tensor = datum.tensors.get(key)
        if tensor is None:
            if key in _OPTIONAL:
                continue
            raise ProtocolError(f"{name}: {loss} needs {key} in loss_fn_inputs")
        if len(tensor) != len(datum.tokens):
            raise ProtocolError(f"{name}: {key} has {len(tensor)} entries for {len(datum.tokens)} tokens")
        if (key == "target_tokens") != (tensor.dtype.kind == "i"):
            raise ProtocolError(f"{name}: {key} has elements of type {tensor.dtype}")


def _leave_out_fillers(
    name: str, datum: TinkerDatum, loss: str, coefficients: Array | None, mask: Floats
) -> None:
    targets = datum.tensors["target_tokens"]
    others = np.flatnonzero(targets[:-1] != datum.tokens[1:])
    if len(others) == 0:
        return
    free = loss != "dro" and coefficients is not None
    wrong = others[coefficients[others] != 0] if free and coefficients is not None else others
    if len(wrong):
        place = int(wrong[0])
        raise ProtocolError(
            f"{name}: target_tokens[{place}] is {int(targets[place])}, but the input goes on with "
            f"{int(datum.tokens[place + 1])}: targets have to be the inputs, one place on"
        )
    mask[others + 1] = 0


def _last_target(name: str, targets: Array) -> int:
    """The others are compared with the inputs; this one would be cut to 32 bits."""
    last = int(targets[-1])
    if not 0 <= last < 1 << 31:
        raise ProtocolError(f"{name}: target_tokens[{len(targets) - 1}] is {last}, which is no token")
    return last


def _moved(values: Array | None, count: int, *, first: float, default: float) -> Floats:
    """One place on, so that index i speaks of token i."""
    moved = np.empty(count + 1, np.float32)
    moved[0] = first
    moved[1:] = default if values is None else values
    return moved
