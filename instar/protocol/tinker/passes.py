"""Forward and backward passes, read from protobuf or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from instar.config import LossConfig
from instar.protocol.base import ProtocolError
from instar.protocol.tinker import messages
from instar.protocol.tinker.datums import Array, TinkerDatum, to_samples
from instar.protocol.tinker.requests import (
    TinkerChunk,
    TinkerForward,
    TinkerForwardBackward,
    TinkerJsonDatum,
    TinkerPassInput,
    TinkerTensor,
    parse_json,
)
from instar.types import Ids, Sample

_SETTINGS = {
    "ppo": {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    "cispo": {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    "dro": {"beta": "beta"},
}
"""By loss, what its config may set, and the name we have for it."""


@dataclass(frozen=True, slots=True)
class TinkerBatch:
    samples: list[Sample]
    loss: LossConfig


@dataclass(frozen=True, slots=True)
class TinkerPass:
    """One request. What is wrong with its data is told when its turn has come: its sequence id counts."""

    model_id: str
    seq: int | None
    forward_only: bool
    batch: TinkerBatch | ProtocolError

    def require_batch(self) -> TinkerBatch:
        if isinstance(self.batch, ProtocolError):
            raise self.batch
        return self.batch


def parse_protobuf_pass(body: bytes) -> TinkerPass:
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ProtocolError(f"the request is not understood: {error}") from error
    return TinkerPass(
        message.model_id, message.seq_id or None, message.forward_only, _protobuf_batch(message)
    )


def parse_json_pass(body: bytes, *, forward_only: bool) -> TinkerPass:
    if forward_only:
        forward = parse_json(body, TinkerForward)
        return TinkerPass(forward.model_id, forward.seq_id, True, _json_batch(forward.forward_input))
    both = parse_json(body, TinkerForwardBackward)
    return TinkerPass(both.model_id, both.seq_id, False, _json_batch(both.forward_backward_input))


def _protobuf_batch(message: Any) -> TinkerBatch | ProtocolError:
    settings: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    settings |= {entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2}
    try:
        datums = [_protobuf_datum(index, datum) for index, datum in enumerate(message.data)]
        return _batch(datums, message.loss_fn, settings)
    except ProtocolError as error:
        return error


def _json_batch(given: TinkerPassInput) -> TinkerBatch | ProtocolError:
    try:
        datums = [_json_datum(index, datum) for index, datum in enumerate(given.data)]
        return _batch(datums, given.loss_fn, given.loss_fn_config or {})
    except ProtocolError as error:
        return error


def _batch(datums: Sequence[TinkerDatum], loss: str, settings: Mapping[str, float | str]) -> TinkerBatch:
    samples = to_samples(datums, loss)
    known = _SETTINGS.get(loss, {})
    if unknown := sorted(settings.keys() - known.keys()):
        taken = f"it takes {', '.join(known)}" if known else "it takes none"
        raise ProtocolError(f"loss_fn_config: {loss} does not take {', '.join(unknown)}; {taken}")
    try:
        config = LossConfig.model_validate(
            {"name": loss, **{known[key]: value for key, value in settings.items()}}
        )
    except ValidationError as error:
        raise ProtocolError(f"loss_fn_config: {error.errors()[0]['msg']}") from error
    return TinkerBatch(samples, config)


# --- protobuf ---


def _protobuf_datum(index: int, datum: Any) -> TinkerDatum:
    parts = list[Array]()
    for chunk in datum.model_input:
        if chunk.image or chunk.dmel:
            raise ProtocolError(f"datum {index}: only text can be trained on here, not images or sound")
        parts.append(_elements(index, "model_input", chunk.encoded_text.tokens, np.int32))
    tensors = {entry.key: _protobuf_tensor(index, entry.key, entry.value) for entry in datum.loss_fn_inputs}
    return TinkerDatum(_joined(parts), tensors)


_DTYPES = {messages.FLOAT32: np.float32, messages.INT64: np.int64, messages.INT32: np.int32}


def _protobuf_tensor(index: int, name: str, tensor: Any) -> Array:
    if tensor.sparse_csr or len(tensor.shape) > 1:
        raise ProtocolError(f"datum {index}: {name} has to be a dense tensor of one dimension")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ProtocolError(f"datum {index}: {name} has to be float32 or int64")
    return _elements(index, name, tensor.dense, dtype)


def _elements(index: int, name: str, data: bytes, dtype: Any) -> Array:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise ProtocolError(f"datum {index}: {name} breaks off within an element") from error


# --- JSON ---


def _json_datum(index: int, datum: TinkerJsonDatum) -> TinkerDatum:
    tokens = text_tokens(datum.model_input.chunks, f"datum {index}")
    tensors = {name: _json_tensor(index, name, t) for name, t in datum.loss_fn_inputs.items()}
    return TinkerDatum(tokens, tensors)


def text_tokens(chunks: Sequence[TinkerChunk], name: str) -> Ids:
    parts = list[Array]()
    for chunk in chunks:
        if chunk.tokens is None:
            raise ProtocolError(f"{name}: only encoded_text is taken here, not {chunk.type}")
        try:
            parts.append(np.asarray(chunk.tokens, np.int32))
        except OverflowError as error:
            raise ProtocolError(f"{name} has a token that is no int32") from error
    return _joined(parts)


def _json_tensor(index: int, name: str, tensor: TinkerTensor) -> Array:
    if tensor.sparse_crow_indices is not None or len(tensor.shape or ()) > 1:
        raise ProtocolError(f"datum {index}: {name} has to be a dense tensor of one dimension")
    if tensor.dtype not in ("float32", "int64"):
        raise ProtocolError(f"datum {index}: {name} has to be float32 or int64, not {tensor.dtype}")
    try:
        return np.asarray(tensor.data, tensor.dtype)
    except (TypeError, OverflowError) as error:
        raise ProtocolError(f"datum {index}: {name} has an element that is no {tensor.dtype}") from error


def _joined(parts: Sequence[Array]) -> Ids:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.empty(0, np.int32), *parts])
