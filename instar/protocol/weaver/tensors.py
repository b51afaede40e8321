"""Tensors that come as bytes beside the JSON: the SDK's transport `http-binary`.

Such a request has two parts: a manifest, which holds the JSON request, and a pack of raw numbers, perhaps as
one zstd frame, whose size and SHA-256 the manifest tells. Where a tensor would be, the request says where in
the pack it lies. Answers are JSON whatever the transport: the SDK takes them so, and to fetch logprobs in a
second request would cost more than it saves.
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
from instar.protocol.weaver.http import JSON, MULTIPART, WeaverRequest, parse_json

TRANSPORTS = ("default", "http-binary")
DTYPES = {
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
NAME = re.compile(rb'[;\s]name="([^"]*)"')


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
    """Of a tensor in the pack."""

    dtype: str
    shape: list[int]
    size_bytes: int
    offset: int = 0
    format: str = "raw-tensor"
    codec: str = "raw"


class PackedTensor(msgspec.Struct):
    location: TensorLocation = msgspec.field(name="$tensor")


class TensorPack:
    """The numbers beside a request; none beside plain JSON."""

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self._content = content

    def array(self, location: TensorLocation) -> NDArray[Any]:
        """A row, not copied. Raises ProtocolError when there is none at that location."""
        dtype = DTYPES.get(location.dtype)
        if dtype is None or (location.format, location.codec) != ("raw-tensor", "raw"):
            raise ProtocolError(
                f"a tensor is {location.dtype}, {location.format}, {location.codec}: not known here"
            )
        if len(location.shape) != 1 or location.shape[0] < 0:
            raise ProtocolError(f"a tensor has the shape {location.shape}; only rows are taken")
        if location.shape[0] * dtype.itemsize != location.size_bytes:
            raise ProtocolError(
                f"a tensor of {location.shape} {location.dtype} is not {location.size_bytes} bytes"
            )
        if location.offset < 0 or location.offset + location.size_bytes > len(self._content):
            raise ProtocolError("a tensor lies outside the tensor pack, or there is none")
        return np.frombuffer(self._content, dtype, location.shape[0], location.offset)


def unpack_request(request: WeaverRequest, limit: int) -> tuple[WeaverRequest, TensorPack]:
    """The call as plain JSON, and what came beside it, of at most ``limit`` bytes. Raises ProtocolError."""
    if request.media_type == JSON:
        return request, TensorPack()
    parts = _parts(request)
    text = bytes(parts["manifest"])
    manifest = parse_json(text, TensorManifest)
    if manifest.version != 1:
        raise ProtocolError(f"manifests of version {manifest.version} are not known here, only of version 1")
    content = _checked(parts["tensor_pack"], manifest.tensor_pack, limit)
    # The SDK does not send a pack again by itself, so that each time has another trace context. The manifest
    # says all: the model, the sequence id, and the digest of the pack.
    call_id = hashlib.sha256(text).hexdigest()
    return replace(request, content_type=JSON, body=bytes(manifest.request), call_id=call_id), TensorPack(
        content
    )


def _parts(request: WeaverRequest) -> dict[str, memoryview]:
    """Of a multipart body, by name. Not copied: a pack may be large."""
    header = Message()
    header["content-type"] = request.content_type
    delimiter = f"\r\n--{header.get_boundary()}".encode()
    body, view = request.body, memoryview(request.body)
    found: dict[str, memoryview] = {}
    # Before the first there is no line to end.
    at = len(delimiter) - 2 if body.startswith(delimiter[2:]) else len(body)
    while body.startswith(b"\r\n", at):
        begin = body.find(b"\r\n\r\n", at) + 4
        end = body.find(delimiter, begin)
        name = NAME.search(body, at, max(begin, at))
        if begin < 4 or end < 0 or name is None:
            break
        found[name[1].decode("utf-8", "replace")] = view[begin:end]
        at = end + len(delimiter)
    if not body.startswith(b"--", at) or not {"manifest", "tensor_pack"} <= found.keys():
        raise ProtocolError(f"a {MULTIPART} request has the whole parts 'manifest' and 'tensor_pack'")
    return found


def _checked(pack: memoryview, told: TensorPackInfo, limit: int) -> bytes | memoryview:
    if len(pack) != told.size_bytes:
        raise ProtocolError(f"the tensor pack has {len(pack)} bytes, not the {told.size_bytes} it should")
    if hashlib.sha256(pack).hexdigest() != told.sha256.lower():
        raise ProtocolError("the tensor pack is not the one whose SHA-256 the manifest tells")
    if told.codec == "raw":
        return pack
    if told.codec != "zstd" or told.decoded_size_bytes is None:
        raise ProtocolError(f"a tensor pack is raw, or zstd with its decoded size; not {told.codec!r}")
    if not 0 <= told.decoded_size_bytes <= limit:
        raise ProtocolError(f"the tensor pack is larger than the {limit} bytes that this server takes", 413)
    return _decompressed(pack, told.decoded_size_bytes)


def _decompressed(pack: memoryview, size: int) -> bytes:
    """Never more than ``size`` bytes and one, whatever the frame says."""
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(pack) as reader:
            content = reader.read(size + 1)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"the tensor pack cannot be decompressed: {error}") from None
    if len(content) != size:
        raise ProtocolError(f"the tensor pack does not decompress to the {size} bytes it should")
    return content
