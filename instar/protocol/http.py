"""HTTP code that both protocols share: API keys, request bodies, JSON and unknown routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from instar.http.auth import find_key_hash, hash_key
from instar.protocol.base import ProtocolError

T = TypeVar("T")


class KeyStore:
    """The API keys that a server accepts. The hash of a key is the ``owner`` of everything created with that
    key."""

    def __init__(self, keys: Iterable[str], header: str) -> None:
        self._header = header
        self._hashes = [hash_key(key) for key in keys]

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the owner that the request's key belongs to. Raises ProtocolError 401 if the key is missing
        or unknown."""
        key = headers.get(self._header, "").strip()
        if not key:
            raise ProtocolError(f"no API key: send it in the {self._header} header", 401)
        owner = self._find_owner(key)
        if owner is None:
            raise ProtocolError("this API key is not one of this server's", 401)
        return owner

    def _find_owner(self, key: str) -> str | None:
        return find_key_hash(key, self._hashes)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request's body. Raises ProtocolError 413 if it is larger than ``max_bytes``."""
    too_large = ProtocolError(f"the request body is larger than the {max_bytes} bytes allowed", 413)
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise too_large
    return b"".join(parts)


def parse_json(body: bytes | memoryview | msgspec.Raw, shape: type[T]) -> T:
    """Return the JSON decoded into ``shape``. Raises ProtocolError, naming the invalid field."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the request cannot be parsed: {error}") from None


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON response. NumPy arrays become lists and NaN becomes null."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json"
    )


def unknown_route_error(request: Request, error: Exception) -> ProtocolError:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return ProtocolError(f"this server does not offer {request.method} {request.url.path}", status)
