"""Encodes arrays as bytes and values as JSON text, and decodes them.

Token ids are int32 and logprobs float32, little endian, so ``np.frombuffer`` can read them. Versions are
stored as runs of (version, length), because nearly all tokens of a reply have the same version.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, Protocol

import msgspec
import numpy as np

from instar.types import Floats, Ids


class DatabaseRow(Protocol):
    """A row of any database driver. Values are read by column name."""

    def __getitem__(self, key: str, /) -> Any: ...


_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


def pack_ids(ids: Ids) -> bytes:
    return np.asarray(ids, _INT).tobytes()


def unpack_ids(data: bytes) -> Ids:
    return view_ids(data).copy()


def view_ids(data: bytes) -> Ids:
    """Return a read-only view of the bytes, without copying them."""
    return np.frombuffer(data, _INT).astype(np.int32, copy=False)


def pack_floats(values: Floats) -> bytes:
    return np.asarray(values, _FLOAT).tobytes()


def unpack_floats(data: bytes) -> Floats:
    return np.frombuffer(data, _FLOAT).astype(np.float32)


def pack_runs(values: Ids) -> bytes:
    """Encode the values by run length: ``[4 4 4 5]`` → ``[(4, 3), (5, 1)]``."""
    values = np.asarray(values, _INT)
    if len(values) == 0:
        return b""
    data = values.tobytes()
    if data == data[:4] * len(values):
        return data[:4] + len(values).to_bytes(4, "little")
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    lengths = np.diff(starts, append=len(values))
    return np.stack([values[starts], lengths], axis=1).astype(_INT).tobytes()


def unpack_runs(data: bytes) -> Ids:
    runs = np.frombuffer(data, _INT).reshape(-1, 2)
    if len(runs) == 1:  # the usual case, faster than `repeat`
        return np.full(runs[0, 1], runs[0, 0], np.int32)
    return np.repeat(runs[:, 0], runs[:, 1]).astype(np.int32)


def checksum(ids: Ids, preceding_crc: int = 0) -> int:
    """Return the CRC-32 of the packed ids. ``preceding_crc`` is the checksum of the ids before them."""
    return zlib.crc32(np.ascontiguousarray(ids, _INT).data, preceding_crc)


_encode_unicode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":")).encode


def dump_json(value: Any) -> str:
    """Return compact JSON, escaped to ASCII if it has lone surrogates, which UTF-8 cannot encode."""
    text = _encode_unicode(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _encode_ascii(value)
    return text


def dump_message(value: Any) -> str:
    """Encode messages, tools or structs as JSON. Much faster than `dump_json`, but writes NaN as null."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return _encode_ascii(value)


def load_message(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # msgspec rejects an escaped lone surrogate
        return json.loads(text)


def sanitize_text(text: str | None) -> str | None:
    """Escape lone surrogates and NUL, which databases cannot store."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
