"""Tensors sent as raw bytes alongside the JSON, with the SDK's `http-binary` transport.

A request has two parts. The manifest contains the JSON request and the size and SHA-256 of the tensor pack.
The pack contains the raw numbers, optionally compressed as one zstd frame. The JSON request refers to tensors
by their location in the pack. Responses are always JSON, because fetching logprobs in a second request would
cost more than it saves.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from email.message import Message
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from instar.protocol.base import ProtocolError
from instar.protocol.http import parse_json
from instar.protocol.weaver.http import JSON, MULTIPART, WeaverRequest

TRANSPORTS = ("default", "http-binary")
DTYPES = {
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
PART_NAME_PATTERN = re.compile(rb'[;\s]name="([^"]*)"')


class TensorPackInfo(msgspec.Struct):
    size_bytes: int
    sha256: str
    codec: str = "raw"
    decoded_size_bytes: int | None = None


class TensorManifest(msgspec.Struct):
    version: int
    request: msgspec.Raw
    tensor_pack: TensorPackInfo


class TensorLocation(msgspec.Struct):
    dtype: str
    shape: list[int]
    size_bytes: int
    offset: int = 0
    format: str = "raw-tensor"
    codec: str = "raw"


class PackedTensor(msgspec.Struct):
    location: TensorLocation = msgspec.field(name="$tensor")


class TensorPack:
    """The tensors sent with a request. Empty if the request is plain JSON."""

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self._content = content

    def read_array(self, location: TensorLocation) -> NDArray[Any]:
        """Return the tensor at a location without copying it."""
        dtype = DTYPES.get(location.dtype)
        if dtype is None or (location.format, location.codec) != ("raw-tensor", "raw"):
            raise ProtocolError(
                f"a tensor has dtype {location.dtype!r}, format {location.format!r} and codec "
                f"{location.codec!r}; supported: dtype {', '.join(DTYPES)}; format raw-tensor; codec raw"
            )
        if len(location.shape) != 1 or location.shape[0] < 0:
            raise ProtocolError(f"a tensor has shape {location.shape}, expected one non-negative dimension")
        if location.shape[0] * dtype.itemsize != location.size_bytes:
            raise ProtocolError(
                f"size_bytes is {location.size_bytes}, but shape {location.shape} and dtype "
                f"{location.dtype} need {location.shape[0] * dtype.itemsize} bytes"
            )
        if location.offset < 0 or location.offset + location.size_bytes > len(self._content):
            raise ProtocolError(
                f"a tensor of {location.size_bytes} bytes at offset {location.offset} is outside the tensor "
                f"pack of {len(self._content)} bytes"
            )
        return np.frombuffer(self._content, dtype, location.shape[0], location.offset)


def unpack_request(request: WeaverRequest, max_bytes: int) -> tuple[WeaverRequest, TensorPack]:
    """Return the JSON request and its tensors. Raises ProtocolError 400 (malformed) or 413 (too large)."""
    if request.media_type == JSON:
        return request, TensorPack()
    parts = _split_parts(request)
    manifest_json = bytes(parts["manifest"])
    manifest = parse_json(manifest_json, TensorManifest)
    if manifest.version != 1:
        raise ProtocolError(f"unsupported manifest version {manifest.version}; supported: 1")
    content = _decode_pack(parts["tensor_pack"], manifest.tensor_pack, max_bytes)
    # The SDK does not retry requests with a pack, so the client's own retries have different trace contexts.
    # The manifest identifies the call by the model, the sequence id and the digest of the pack.
    call_id = hashlib.sha256(manifest_json).hexdigest()
    json_request = replace(request, content_type=JSON, body=bytes(manifest.request), call_id=call_id)
    return json_request, TensorPack(content)


def _split_parts(request: WeaverRequest) -> dict[str, memoryview]:
    """Return the parts of a multipart body by name, without copying them."""
    header = Message()
    header["content-type"] = request.content_type
    delimiter = f"\r\n--{header.get_boundary()}".encode()
    body, view = request.body, memoryview(request.body)
    parts: dict[str, memoryview] = {}
    # The first delimiter is not preceded by a line break.
    position = len(delimiter) - 2 if body.startswith(delimiter[2:]) else len(body)
    while body.startswith(b"\r\n", position):
        begin = body.find(b"\r\n\r\n", position) + 4
        end = body.find(delimiter, begin)
        name = PART_NAME_PATTERN.search(body, position, max(begin, position))
        if begin < 4 or end < 0 or name is None:
            break
        parts[name[1].decode("utf-8", "replace")] = view[begin:end]
        position = end + len(delimiter)
    if not body.startswith(b"--", position) or not {"manifest", "tensor_pack"} <= parts.keys():
        raise ProtocolError(
            f"the {MULTIPART} body is incomplete or malformed; send the parts 'manifest' and 'tensor_pack'"
        )
    return parts


def _decode_pack(pack: memoryview, info: TensorPackInfo, max_bytes: int) -> bytes | memoryview:
    import zstandard

    if len(pack) != info.size_bytes:
        raise ProtocolError(
            f"the tensor pack has {len(pack)} bytes, but the manifest declares {info.size_bytes}"
        )
    if hashlib.sha256(pack).hexdigest() != info.sha256.lower():
        raise ProtocolError("the SHA-256 of the tensor pack does not match the manifest")
    if info.codec == "raw":
        return pack
    if info.codec != "zstd":
        raise ProtocolError(f"unsupported tensor_pack.codec {info.codec!r}; supported: raw, zstd")
    if info.decoded_size_bytes is None:
        raise ProtocolError("tensor_pack.decoded_size_bytes is missing; the zstd codec requires it")
    if not 0 <= info.decoded_size_bytes <= max_bytes:
        raise ProtocolError(
            f"tensor_pack.decoded_size_bytes must be between 0 and {max_bytes}, "
            f"got {info.decoded_size_bytes}",
            413,
        )
    try:
        with zstandard.ZstdDecompressor().stream_reader(pack) as reader:
            # Limit the read, because the frame may declare any size.
            content = reader.read(info.decoded_size_bytes + 1)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"the tensor pack cannot be decompressed: {error}") from None
    if len(content) != info.decoded_size_bytes:
        relation = "fewer" if len(content) < info.decoded_size_bytes else "more"
        raise ProtocolError(
            f"the decompressed tensor pack has {relation} bytes than declared ({info.decoded_size_bytes})"
        )
    return content
