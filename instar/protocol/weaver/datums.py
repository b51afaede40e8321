"""Converts the datums of a training pass to samples, and logprobs to the response.

A datum is a model input x and a target for each of its tokens: the token that comes next. Entry i of every
tensor applies to target i, which is token i + 1 of our sample::

    model_input    1    2    7    8            token_ids   1    2    7    8    9
    target_tokens  2    7    8    9            mask        0    0    1    1    1
    loss_mask      0    1    1    1            advantages  nan  0   .5   .5   .5
    advantages     0   .5   .5   .5

A target of -100 means that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import ValidationError

from instar.config import LossConfig
from instar.protocol.base import ProtocolError
from instar.protocol.http import parse_json
from instar.protocol.weaver.tensors import PackedTensor, TensorLocation, TensorPack
from instar.types import NOT_SAMPLED, Floats, Sample

NO_TARGET = -100
RATIO_LOSSES = ("importance_sampling", "ppo", "cispo", "dro")
LOSSES = ("cross_entropy", *RATIO_LOSSES, "surrogate")
"""The supported losses. `surrogate` is the second half of the SDK's `forward_backward_custom`."""
LOGPROBS_ONLY = "forward_logprob"
OPTIONS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta"}
"""The option names in `loss_fn_config`, with Instar's names for them."""
Ints = NDArray[np.int64]
NO_PACK = TensorPack()


class WeaverChunk(msgspec.Struct):
    tokens: list[int] | PackedTensor
    type: str = "encoded_text"


class WeaverModelInput(msgspec.Struct):
    chunks: list[WeaverChunk]

    def tokens(self, pack: TensorPack = NO_PACK) -> Ints:
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise ProtocolError(
                    f"chunks of type {chunk.type!r} are not supported; supported: 'encoded_text'"
                )
        try:
            rows = [_to_row(chunk.tokens, pack) for chunk in self.chunks]
        except OverflowError:
            raise ProtocolError("a token id is too large for 64 bits") from None
        return rows[0] if len(rows) == 1 else np.concatenate([np.empty(0, np.int64), *rows])


def _to_row(tokens: list[int] | PackedTensor, pack: TensorPack) -> Ints:
    if isinstance(tokens, list):
        return np.array(tokens, np.int64)
    row = pack.array(tokens.location)
    if row.dtype.kind != "i":
        raise ProtocolError(f"tokens have dtype {row.dtype}; they must be whole numbers")
    return row.astype(np.int64)


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
    """A tensor's numbers, or their location in the tensor pack."""

    data: list[float] | None = None
    location: TensorLocation | None = msgspec.field(name="$tensor", default=None)


@dataclass(frozen=True, slots=True)
class WeaverBatch:
    """The samples of a pass. ``loss`` is None if the client requested only logprobs."""

    loss: LossConfig | None
    samples: list[Sample]
    scored: list[NDArray[np.bool_]]
    """One array per datum: True for the targets that are tokens of the sample."""
    datum_ids: list[str | None]


def parse_batch(
    pass_input: WeaverPassInput, pack: TensorPack = NO_PACK, *, vocab_size: int, backward: bool
) -> WeaverBatch:
    """Return the samples of a pass. Raises ProtocolError, naming the unsupported field or invalid datum."""
    loss_fn = pass_input.loss_fn
    if backward and loss_fn == LOGPROBS_ONLY:
        raise ProtocolError(f"loss_fn {LOGPROBS_ONLY!r} has no backward pass")
    if loss_fn not in (*LOSSES, LOGPROBS_ONLY):
        raise ProtocolError(
            f"loss_fn {loss_fn!r} is not supported; supported: {', '.join(LOSSES)}, and {LOGPROBS_ONLY} for "
            "a forward pass"
        )
    if not pass_input.data:
        raise ProtocolError("data is empty; send at least one datum")
    parsed = [_parse_datum(datum, pack, loss_fn, i, vocab_size) for i, datum in enumerate(pass_input.data)]
    return WeaverBatch(
        parse_loss(loss_fn, pass_input.loss_fn_config),
        [sample for sample, _ in parsed],
        [scored for _, scored in parsed],
        [datum.datum_id for datum in pass_input.data],
    )


def parse_loss(name: str, config: dict[str, Any]) -> LossConfig | None:
    """Return the loss settings. An unknown option is rejected unless its value has no effect."""
    options: dict[str, Any] = {}
    for key, value in config.items():
        if key in OPTIONS:
            options[OPTIONS[key]] = value
        elif value not in (None, False, 0, "sum"):
            raise ProtocolError(
                f"loss_fn_config.{key} = {value!r} is not supported; supported: {', '.join(OPTIONS)}"
            )
    if name == LOGPROBS_ONLY:
        return None
    try:
        return LossConfig(name="cross_entropy" if name == "surrogate" else name, **options)  # pyright: ignore[reportArgumentType] - checked by the caller
    except ValidationError as error:
        first = error.errors()[0]
        client_names = {ours: theirs for theirs, ours in OPTIONS.items()}
        field = str(first["loc"][0])
        raise ProtocolError(f"loss_fn_config.{client_names.get(field, field)}: {first['msg']}") from None


def _parse_datum(
    datum: WeaverDatum, pack: TensorPack, loss_fn: str, index: int, vocab_size: int
) -> tuple[Sample, NDArray[np.bool_]]:
    if datum.model_input is None:
        raise ProtocolError(f"datum {index} has no model_input; managed datasets are not supported")
    if "router_replay" in datum.metadata:
        raise ProtocolError(f"datum {index}: router replay is not supported")
    tokens = datum.model_input.tokens(pack)
    inputs = _LossInputs(datum.loss_fn_inputs, pack, index, len(tokens))
    targets = inputs.ints("target_tokens")
    has_target = targets != NO_TARGET
    ids = np.append(tokens, targets[-1:][has_target[-1:]])
    _check_ids(ids, index, vocab_size)
    scored = has_target & (np.append(tokens[1:], targets[-1:]) == targets)
    mask, advantages, logprobs = _loss_tensors(inputs, loss_fn, scored)
    invalid = np.flatnonzero((mask != 0) & has_target & ~scored)
    if len(invalid):
        at = int(invalid[0])
        raise ProtocolError(
            f"datum {index}: target {at} is {int(targets[at])}, but the next token of the model input is "
            f"{int(tokens[at + 1])}; each target must be the next token"
        )
    size = len(ids)
    sample = Sample(
        sample_key=f"datum {index}",
        session_id="",
        token_ids=ids.astype(np.int32),
        mask=_shift(np.where(scored, mask, 0), size, first=0.0),
        logprobs=_shift(logprobs, size),
        advantages=_shift(advantages, size),
        versions=np.full(size, NOT_SAMPLED, np.int32),
    )
    return sample, scored


def _loss_tensors(
    inputs: _LossInputs, loss_fn: str, scored: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """Return the mask, the advantages and the old logprobs of the targets."""
    nans = np.full(len(scored), np.nan, np.float32)
    ones = np.ones(len(scored), np.float32)
    if loss_fn == LOGPROBS_ONLY:
        return np.where(scored, ones, 0), nans, nans
    if loss_fn == "surrogate":
        return ones, -inputs.floats("surrogate_weights"), nans
    if loss_fn == "cross_entropy":
        inputs.allow("target_tokens", "weights", "loss_mask")
        weights = inputs.floats("weights") if "weights" in inputs else ones
        # Without a mask every target is scored, even with a weight of 0: clients compute metrics from the
        # logprobs.
        mask = (
            inputs.floats("loss_mask")
            if "loss_mask" in inputs
            else np.where(scored | (weights != 0), ones, 0)
        )
        return mask, weights, nans
    inputs.allow("target_tokens", "logprobs", "advantages", "loss_mask")
    return inputs.floats("loss_mask"), inputs.floats("advantages"), inputs.floats("logprobs")


class _LossInputs:
    """The ``loss_fn_inputs`` of a datum: tensors with one entry per token of its model input."""

    def __init__(self, tensors: dict[str, msgspec.Raw], pack: TensorPack, index: int, length: int) -> None:
        self._tensors = tensors
        self._pack = pack
        self._index = index
        self._length = length

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def allow(self, *names: str) -> None:
        for name in self._tensors:
            if name not in names:
                raise ProtocolError(
                    f"datum {self._index}: loss_fn_inputs.{name} is not known to this loss; supported: "
                    f"{', '.join(names)}"
                )

    def floats(self, name: str) -> Floats:
        with np.errstate(over="ignore"):
            values = self._values(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise ProtocolError(f"datum {self._index}: loss_fn_inputs.{name} has a number that is not finite")
        return values

    def ints(self, name: str) -> Ints:
        values = self._values(name)
        with np.errstate(invalid="ignore"):
            integers = values.astype(np.int64)
        if (integers != values).any():
            raise ProtocolError(
                f"datum {self._index}: loss_fn_inputs.{name} has a number that is not an integer"
            )
        return integers

    def _values(self, name: str) -> NDArray[Any]:
        if name not in self._tensors:
            raise ProtocolError(f"datum {self._index}: loss_fn_inputs.{name} is missing")
        tensor = parse_json(self._tensors[name], WeaverTensor)
        if tensor.location is not None:
            values = self._pack.array(tensor.location)
        elif tensor.data is not None:
            values = np.array(tensor.data, np.float64)
        else:
            raise ProtocolError(f"datum {self._index}: loss_fn_inputs.{name} cannot be parsed: no data")
        if len(values) != self._length:
            raise ProtocolError(
                f"datum {self._index}: loss_fn_inputs.{name} has {len(values)} entries for "
                f"{self._length} tokens of the model input"
            )
        return values


def _check_ids(ids: Ints, index: int, vocab_size: int) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise ProtocolError(
            f"datum {index}: token {int(ids[at])} at {at} is outside the vocabulary of {vocab_size}"
        )


def _shift(values: Floats, size: int, *, first: float = np.nan) -> Floats:
    """Return the targets' values shifted by one, so that index i describes token i of the sample."""
    shifted = np.empty(size, np.float32)
    shifted[:1] = first
    shifted[1:] = values[: max(size - 1, 0)]
    return shifted


def build_outputs(batch: WeaverBatch, logprobs: Sequence[Floats]) -> list[dict[str, Any]]:
    """Return `loss_fn_outputs`: the logprobs of each datum's targets (NaN where no logprob was computed)."""
    return [
        {
            "logprobs": {"data": _encode_numbers(_per_target(values, scored)), "dtype": "float32"},
            **({} if datum_id is None else {"datum_id": datum_id}),
        }
        for values, scored, datum_id in zip(logprobs, batch.scored, batch.datum_ids, strict=True)
    ]


def _per_target(logprobs: Floats, scored: NDArray[np.bool_]) -> Floats:
    aligned = np.full(len(scored), np.nan, np.float32)
    aligned[: max(len(logprobs) - 1, 0)] = logprobs[1:]
    return np.where(scored, aligned, np.float32(np.nan))


def _encode_numbers(values: Floats) -> orjson.Fragment:
    """Return the values as JSON with `NaN` literals. The SDK cannot make a tensor of a list that contains
    null."""
    return orjson.Fragment(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY).replace(b"null", b"NaN"))
