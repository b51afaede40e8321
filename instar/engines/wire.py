"""Encode and decode the messages between RemoteEngine and `instar.engines.server`, which documents them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from instar.errors import EngineError
from instar.types import FinishReason, Floats, Ids, PolicyRef, SamplingParams, TokenChunk

LEASE_HEADER = "x-instar-lease"
"""The number of the trainer's lease, sent with weights."""
LENGTH_BYTES = 4
ID_TYPE = np.dtype("<i4")
FLOAT_TYPE = np.dtype("<f4")


class _RequestHeader(msgspec.Struct, omit_defaults=True):
    params: SamplingParams
    policy: PolicyRef | None = None


class _ChunkLine(msgspec.Struct):
    """A TokenChunk with None for missing logprobs, because JSON has no NaN."""

    token_ids: list[int]
    logprobs: list[float | None]
    versions: list[int]
    behavior_logprobs: list[float | None] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None


_encode = msgspec.json.encode
_decode_chunk = msgspec.json.Decoder(_ChunkLine).decode
_decode_header = msgspec.json.Decoder(_RequestHeader).decode


def pack_request(prompt: Ids, params: SamplingParams, policy: PolicyRef | None = None) -> bytes:
    header = _encode(_RequestHeader(params, policy))
    return b"".join((len(header).to_bytes(LENGTH_BYTES, "little"), header, pack_ids(prompt)))


def unpack_request(body: bytes | bytearray) -> tuple[Ids, SamplingParams, PolicyRef | None]:
    start = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
    if len(body) < start:
        raise EngineError(f"The body is truncated: {len(body)} bytes, but its header ends at byte {start}.")
    if leftover := (len(body) - start) % ID_TYPE.itemsize:
        raise EngineError(f"The prompt must consist of 4-byte token ids, but {leftover} bytes are left over.")
    try:
        header = _decode_header(body[LENGTH_BYTES:start])
    except msgspec.DecodeError as error:
        raise EngineError(f"The sampling params are invalid: {error}") from error
    # A copy, because the ids may be unaligned in the body and a view of the body would be read-only.
    return np.frombuffer(body, ID_TYPE, offset=start).astype(np.int32), header.params, header.policy


def pack_ids(ids: Ids) -> bytes:
    return ids.astype(ID_TYPE, copy=False).tobytes()


def pack_floats(values: Floats) -> bytes:
    return values.astype(FLOAT_TYPE, copy=False).tobytes()


def unpack_floats(body: bytes, length: int) -> Floats:
    if len(body) != length * FLOAT_TYPE.itemsize:
        raise EngineError(f"The engine sent {len(body)} bytes for {length} logprobs of 4 bytes each.")
    return np.frombuffer(body, FLOAT_TYPE).astype(np.float32)


def join_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    if len(chunks) == 1:
        return chunks[0]
    behavior = None
    if any(chunk.behavior_logprobs is not None for chunk in chunks):
        behavior = [
            value
            for chunk in chunks
            for value in chunk.behavior_logprobs or [math.nan] * len(chunk.token_ids)
        ]
    return TokenChunk(
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=[value for chunk in chunks for value in chunk.logprobs],
        versions=[version for chunk in chunks for version in chunk.versions],
        behavior_logprobs=behavior,
        finish_reason=chunks[-1].finish_reason,
        stop=chunks[-1].stop,
    )


def encode_line(chunk: TokenChunk) -> bytes:
    return _encode(chunk) + b"\n"


def decode_line(line: bytes) -> TokenChunk:
    chunk = _decode_chunk(line)
    behavior = None if chunk.behavior_logprobs is None else _replace_none(chunk.behavior_logprobs)
    logprobs = _replace_none(chunk.logprobs)
    return TokenChunk(chunk.token_ids, logprobs, chunk.versions, behavior, chunk.finish_reason, chunk.stop)


def _replace_none(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
