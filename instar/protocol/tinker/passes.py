"""Parses protobuf and JSON requests for forward and forward-backward passes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from instar.config import LossConfig
from instar.protocol.base import ProtocolError
from instar.protocol.http import find_sequence_id, parse_json
from instar.protocol.tinker import messages, requests
from instar.protocol.tinker.datums import Array, TinkerDatum, to_samples
from instar.protocol.wire import build_loss_config
from instar.types import Ids, Sample

_OPTIONS_BY_LOSS = {
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}
_MODEL_ID_PATTERN = re.compile(rb'"model_id"\s*:\s*"([^"\\]+)"')
_DTYPES = {messages.FLOAT32: np.float32, messages.INT64: np.int64, messages.INT32: np.int32}
_DTYPE_NAMES = ", ".join(f"{number} ({dtype.__name__})" for number, dtype in _DTYPES.items())


@dataclass(frozen=True, slots=True)
class TinkerBatch:
    samples: list[Sample]
    loss: LossConfig


@dataclass(frozen=True, slots=True)
class TinkerPass:
    """A request for a pass. If its data is invalid, ``batch`` is the error, which is raised when the pass
    runs, because the request must still use up its sequence id."""

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
        raise ProtocolError(f"the request cannot be parsed: {error}") from error
    options: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    options |= {entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2}
    datums = (_parse_protobuf_datum(index, datum) for index, datum in enumerate(message.data))
    batch = _build_batch(datums, message.loss_fn, options)
    return TinkerPass(message.model_id, message.seq_id or None, message.forward_only, batch)


def parse_json_pass(body: bytes, *, forward_only: bool) -> TinkerPass:
    request = parse_json(body, requests.ForwardRequest if forward_only else requests.ForwardBackwardRequest)
    pass_input = request.pass_input
    datums = (
        TinkerDatum(
            concatenate_chunks(datum.model_input.chunks, f"datum {index}"),
            {name: _parse_json_tensor(index, name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for index, datum in enumerate(pass_input.data)
    )
    batch = _build_batch(datums, pass_input.loss_fn, pass_input.loss_fn_config or {})
    return TinkerPass(request.model_id, request.seq_id, forward_only, batch)


def read_request_ids(body: bytes, *, is_protobuf: bool) -> requests.ModelRequest:
    """Read the ids from a request that may be invalid. Use "" or None for an id that cannot be read."""
    if is_protobuf:
        message = messages.ForwardBackwardRequest()
        with contextlib.suppress(DecodeError):  # the fields before the error are set
            message.ParseFromString(body)
        return requests.ModelRequest(message.model_id, message.seq_id or None)
    match = _MODEL_ID_PATTERN.search(body)
    return requests.ModelRequest(match[1].decode("utf-8", "replace") if match else "", find_sequence_id(body))


def _build_batch(
    datums: Iterable[TinkerDatum], loss: str, options: Mapping[str, float | str]
) -> TinkerBatch | ProtocolError:
    """Return the batch, or the error if the datums or the options are invalid."""
    try:
        samples = to_samples(list(datums), loss)
        supported = _OPTIONS_BY_LOSS.get(loss, ())
        if unknown := sorted(options.keys() - supported):
            raise ProtocolError(
                f"unknown loss_fn_config options {', '.join(unknown)}; {loss} supports "
                f"{', '.join(supported) or 'no options'}"
            )
        return TinkerBatch(samples, build_loss_config(loss, options))
    except ProtocolError as error:
        return error


def _concatenate(parts: Sequence[Array]) -> Ids:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.empty(0, np.int32), *parts])


# --- protobuf ---


def _parse_protobuf_datum(index: int, datum: Any) -> TinkerDatum:
    parts: list[Array] = []
    for chunk in datum.model_input:
        if chunk.image or chunk.dmel:
            raise ProtocolError(f"datum {index}: images and audio are not supported; send only text")
        parts.append(_decode_elements(index, "model_input", chunk.encoded_text.tokens, np.int32))
    tensors = {
        entry.key: _parse_protobuf_tensor(index, entry.key, entry.value) for entry in datum.loss_fn_inputs
    }
    return TinkerDatum(_concatenate(parts), tensors)


def _parse_protobuf_tensor(index: int, name: str, tensor: Any) -> Array:
    if tensor.sparse_csr or len(tensor.shape) > 1:
        raise ProtocolError(f"datum {index}: {name} must be a dense, one-dimensional tensor")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ProtocolError(f"datum {index}: {name} has dtype {tensor.dtype}; supported: {_DTYPE_NAMES}")
    return _decode_elements(index, name, tensor.dense, dtype)


def _decode_elements(index: int, name: str, data: bytes, dtype: Any) -> Array:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise ProtocolError(
            f"datum {index}: {name} has {len(data)} bytes, expected a multiple of {np.dtype(dtype).itemsize}"
        ) from error


# --- JSON ---


def concatenate_chunks(chunks: Sequence[requests.Chunk], name: str) -> Ids:
    parts: list[Array] = []
    for chunk in chunks:
        if chunk.tokens is None:
            raise ProtocolError(
                f"{name}: a chunk of type {chunk.type!r} has no tokens; only encoded_text is supported"
            )
        try:
            parts.append(np.asarray(chunk.tokens, np.int32))
        except OverflowError as error:
            raise ProtocolError(f"{name}: a token id is not a signed 32-bit integer") from error
    return _concatenate(parts)


def _parse_json_tensor(index: int, name: str, tensor: requests.Tensor) -> Array:
    if tensor.sparse_crow_indices is not None or len(tensor.shape or ()) > 1:
        raise ProtocolError(f"datum {index}: {name} must be a dense, one-dimensional tensor")
    if tensor.dtype not in ("float32", "int64"):
        raise ProtocolError(f"datum {index}: {name} has dtype {tensor.dtype!r}; supported: float32, int64")
    try:
        return np.asarray(tensor.data, tensor.dtype)
    except (TypeError, OverflowError) as error:
        raise ProtocolError(f"datum {index}: {name} has an element that is not a {tensor.dtype}") from error
