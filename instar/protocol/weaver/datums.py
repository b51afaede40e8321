"""Converts the datums of a training pass to samples, and logprobs to the response.

A datum has a model input and one target per input token: the next token. Entry i of every tensor applies to
target i, which is token i + 1 of the sample::

    model_input    1    2    7    8            token_ids   1    2    7    8    9
    target_tokens  2    7    8    9            mask        0    0    1    1    1
    loss_mask      0    1    1    1            advantages  0    0   .5   .5   .5
    advantages     0   .5   .5   .5

A target of -100 means that the token has no target. All other targets in the loss must be the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from instar.config import LossConfig
from instar.protocol.base import ProtocolError
from instar.protocol.http import parse_json
from instar.protocol.weaver.tensors import PackedTensor, TensorLocation, TensorPack
from instar.protocol.wire import LOSS_OPTIONS, build_loss_config, build_sample
from instar.types import Floats, Sample

NO_TARGET = -100
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "surrogate")
"""The supported losses. The SDK's `forward_backward_custom` uses `surrogate` for its backward pass."""
LOGPROBS_ONLY = "forward_logprob"
Ints = NDArray[np.int64]
NO_PACK = TensorPack()


class WeaverChunk(msgspec.Struct):
    tokens: list[int] | PackedTensor
    type: str = "encoded_text"


class WeaverModelInput(msgspec.Struct):
    chunks: list[WeaverChunk]

    def decode_tokens(self, pack: TensorPack = NO_PACK) -> Ints:
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise ProtocolError(f"unsupported chunk type {chunk.type!r}; supported: encoded_text")
        try:
            parts = [_decode_chunk(chunk.tokens, pack) for chunk in self.chunks]
        except OverflowError:
            raise ProtocolError("a token id does not fit into 64 bits") from None
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])


def _decode_chunk(tokens: list[int] | PackedTensor, pack: TensorPack) -> Ints:
    if isinstance(tokens, list):
        return np.array(tokens, np.int64)
    ids = pack.read_array(tokens.location)
    if ids.dtype.kind != "i":
        raise ProtocolError(f"tokens have dtype {ids.dtype}; supported: int32, int64")
    return ids.astype(np.int64)


class WeaverDatum(msgspec.Struct):
    loss_fn_inputs: dict[str, msgspec.Raw]
    model_input: WeaverModelInput | None = None
    metadata: dict[str, Any] = {}
    datum_id: str | None = None


class WeaverPassInput(msgspec.Struct):
    loss_fn: str
    data: list[WeaverDatum]
    loss_fn_config: dict[str, Any] = {}


class WeaverTensor(msgspec.Struct):
    """The values of a tensor, or their location in the tensor pack."""

    data: list[float] | None = None
    location: TensorLocation | None = msgspec.field(name="$tensor", default=None)


@dataclass(frozen=True, slots=True)
class WeaverBatch:
    loss: LossConfig | None
    """None if the client requested only logprobs."""
    samples: list[Sample]
    scored_masks: list[NDArray[np.bool_]]
    """One array per datum. An entry is True if the target is the next token, so its logprob is computed."""
    datum_ids: list[str | None]


def parse_batch(
    pass_input: WeaverPassInput, pack: TensorPack = NO_PACK, *, vocab_size: int, is_backward: bool
) -> WeaverBatch:
    """Build the samples for a pass. Raises ProtocolError if a field or a datum is invalid."""
    loss_fn = pass_input.loss_fn
    if is_backward and loss_fn == LOGPROBS_ONLY:
        raise ProtocolError(f"loss_fn {LOGPROBS_ONLY!r} is supported only in a forward pass")
    if loss_fn not in (*LOSSES, LOGPROBS_ONLY):
        raise ProtocolError(
            f"unknown loss_fn {loss_fn!r}; supported: {', '.join(LOSSES)}, and {LOGPROBS_ONLY} for a "
            "forward pass"
        )
    if not pass_input.data:
        raise ProtocolError("data is empty; send at least one datum")
    parsed = [_parse_datum(datum, pack, loss_fn, i, vocab_size) for i, datum in enumerate(pass_input.data)]
    return WeaverBatch(
        _parse_loss(loss_fn, pass_input.loss_fn_config),
        [sample for sample, _ in parsed],
        [is_scored for _, is_scored in parsed],
        [datum.datum_id for datum in pass_input.data],
    )


def _parse_loss(loss_fn: str, config: dict[str, Any]) -> LossConfig | None:
    """Parse the loss settings. Unknown options are rejected unless their values have no effect."""
    for key, value in config.items():
        if key not in LOSS_OPTIONS and value not in (None, False, 0, "sum"):
            raise ProtocolError(
                f"unknown option loss_fn_config.{key} ({value!r}); supported: {', '.join(LOSS_OPTIONS)}"
            )
    if loss_fn == LOGPROBS_ONLY:
        return None
    options = {key: value for key, value in config.items() if key in LOSS_OPTIONS}
    return build_loss_config("cross_entropy" if loss_fn == "surrogate" else loss_fn, options)


def _parse_datum(
    datum: WeaverDatum, pack: TensorPack, loss_fn: str, index: int, vocab_size: int
) -> tuple[Sample, NDArray[np.bool_]]:
    if datum.model_input is None:
        raise ProtocolError(f"datum {index}: model_input is missing; managed datasets are not supported")
    if "router_replay" in datum.metadata:
        raise ProtocolError(f"datum {index}: router replay is not supported; remove metadata.router_replay")
    tokens = datum.model_input.decode_tokens(pack)
    inputs = _LossInputs(datum.loss_fn_inputs, pack, index, len(tokens))
    targets = inputs.read_ints("target_tokens")
    has_target = targets != NO_TARGET
    ids = np.append(tokens, targets[-1:][has_target[-1:]])
    invalid = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(invalid):
        raise ProtocolError(
            f"datum {index}: token {ids[invalid[0]]} at index {invalid[0]} is outside the vocabulary of "
            f"{vocab_size} tokens"
        )
    is_scored = has_target & (np.append(tokens[1:], targets[-1:]) == targets)
    mask, advantages, logprobs = _read_loss_tensors(inputs, loss_fn, is_scored)
    mismatches = np.flatnonzero((mask != 0) & has_target & ~is_scored)
    if len(mismatches):
        position = int(mismatches[0])
        raise ProtocolError(
            f"datum {index}: target_tokens[{position}] is {targets[position]}, but the next input token is "
            f"{tokens[position + 1]}; send the next input token, or {NO_TARGET} for no target"
        )
    mask = np.where(is_scored, mask, 0)
    sample = build_sample(
        f"datum {index}", ids.astype(np.int32), mask=mask, logprobs=logprobs, advantages=advantages
    )
    return sample, is_scored


def _read_loss_tensors(
    inputs: _LossInputs, loss_fn: str, is_scored: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """Return the mask, the advantages or weights, and the old logprobs. Unused values are NaN."""
    nans = np.full(len(is_scored), np.nan, np.float32)
    ones = np.ones(len(is_scored), np.float32)
    if loss_fn == LOGPROBS_ONLY:
        return np.where(is_scored, ones, 0), nans, nans
    if loss_fn == "surrogate":
        return ones, -inputs.read_floats("surrogate_weights"), nans
    if loss_fn == "cross_entropy":
        inputs.allow_only("target_tokens", "weights", "loss_mask")
        weights = inputs.read_floats("weights") if "weights" in inputs else ones
        if "loss_mask" in inputs:
            return inputs.read_floats("loss_mask"), weights, nans
        # Targets with weight 0 are scored too, because clients compute metrics from the logprobs.
        return np.where(is_scored | (weights != 0), ones, 0), weights, nans
    inputs.allow_only("target_tokens", "logprobs", "advantages", "loss_mask")
    return inputs.read_floats("loss_mask"), inputs.read_floats("advantages"), inputs.read_floats("logprobs")


class _LossInputs:
    """The ``loss_fn_inputs`` of a datum. Each tensor has one entry per token of the model input."""

    def __init__(self, tensors: dict[str, msgspec.Raw], pack: TensorPack, index: int, length: int) -> None:
        self._tensors = tensors
        self._pack = pack
        self._index = index
        self._length = length

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def allow_only(self, *names: str) -> None:
        for name in self._tensors:
            if name not in names:
                raise self._make_error(name, f"is not used by this loss; supported: {', '.join(names)}")

    def read_floats(self, name: str) -> Floats:
        with np.errstate(over="ignore"):
            values = self._read_values(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise self._make_error(name, "has a value that is not a finite float32")
        return values

    def read_ints(self, name: str) -> Ints:
        values = self._read_values(name)
        with np.errstate(invalid="ignore"):
            integers = values.astype(np.int64)
        if (integers != values).any():
            raise self._make_error(name, "has a value that is not an integer")
        return integers

    def _read_values(self, name: str) -> NDArray[Any]:
        if name not in self._tensors:
            raise self._make_error(name, "is missing; this loss requires it")
        tensor = parse_json(self._tensors[name], WeaverTensor)
        if tensor.location is not None:
            values = self._pack.read_array(tensor.location)
        elif tensor.data is not None:
            values = np.array(tensor.data, np.float64)
        else:
            raise self._make_error(name, "has neither data nor $tensor")
        if len(values) != self._length:
            raise self._make_error(
                name, f"has {len(values)} entries, but model_input has {self._length} tokens"
            )
        return values

    def _make_error(self, name: str, message: str) -> ProtocolError:
        return ProtocolError(f"datum {self._index}: loss_fn_inputs.{name} {message}")


def build_outputs(batch: WeaverBatch, logprobs: Sequence[Floats]) -> list[dict[str, Any]]:
    """Build `loss_fn_outputs`: the logprobs of each datum's targets, with NaN for unscored targets."""
    outputs: list[dict[str, Any]] = []
    for values, is_scored, datum_id in zip(logprobs, batch.scored_masks, batch.datum_ids, strict=True):
        target_logprobs = np.full(len(is_scored), np.nan, np.float32)
        target_logprobs[: max(len(values) - 1, 0)] = values[1:]
        target_logprobs[~is_scored] = np.nan
        # The SDK cannot convert null to a tensor element, so the JSON has `NaN` literals.
        data = orjson.dumps(target_logprobs, option=orjson.OPT_SERIALIZE_NUMPY).replace(b"null", b"NaN")
        fields = {"logprobs": {"data": orjson.Fragment(data), "dtype": "float32"}}
        outputs.append(fields if datum_id is None else {**fields, "datum_id": datum_id})
    return outputs
