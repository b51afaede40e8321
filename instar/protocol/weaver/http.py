"""Requests and answers: whose key it is, how large a body may be, how an error reads.

An error is ``{"error": <code>, "message", "retryable"}``.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from instar.protocol.base import ProtocolError
from instar.protocol.errors import to_protocol_error

KEY_HEADER = "x-weaver-api-key"
JSON, MULTIPART = "application/json", "multipart/form-data"
CODES = {
    400: "invalid_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "payload_too_large",
    415: "unsupported_media_type",
    429: "rate_limited",
    501: "not_offered",
    503: "unavailable",
}
RETRYABLE = frozenset({429, 503})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeaverRequest:
    """One request, its key checked. ``path`` holds what the route's pattern matched."""

    owner: str
    path_params: dict[str, str]
    content_type: str
    body: bytes
    call_id: str | None
    """Of the call: the SDK sends one again with the same trace context, and another with another."""

    @property
    def media_type(self) -> str:
        """`JSON` or `MULTIPART`."""
        return self.content_type.partition(";")[0].strip().lower()

    def parse(self, shape: type[T]) -> T:
        if self.media_type != JSON:
            raise ProtocolError(f"only passes are taken as {self.media_type}", 415)
        return parse_json(self.body or b"{}", shape)


WeaverHandler = Callable[[WeaverRequest], Awaitable[Response]]


class WeaverKeyStore:
    """The keys that are let in. Only hashes are kept; the hash of a key is the owner of what it makes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._owners = [_hash(key) for key in keys]

    def authenticate(self, key: str | None) -> str:
        if not key:
            raise ProtocolError("no API key: send it as X-WEAVER-API-KEY", 401)
        given = _hash(key)
        # Every key is compared, so that the time taken tells nothing.
        if not max([hmac.compare_digest(given, owner) for owner in self._owners], default=False):
            raise ProtocolError("the API key is not one of this server's", 401)
        return given


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def make_endpoint(
    handler: WeaverHandler, keys: WeaverKeyStore, max_body: int
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(http: Request) -> Response:
        try:
            request = WeaverRequest(
                owner=keys.authenticate(http.headers.get(KEY_HEADER)),
                path_params=http.path_params,
                content_type=http.headers.get("content-type", JSON),
                body=await _read(http, max_body),
                call_id=http.headers.get("traceparent"),
            )
            if request.media_type not in (JSON, MULTIPART):
                raise ProtocolError(
                    f"this server takes {JSON} and {MULTIPART}, not {request.media_type!r}", 415
                )
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must be told
            return error_response(to_protocol_error(error))

    return handle


async def _read(request: Request, limit: int) -> bytes:
    too_large = ProtocolError(f"the request is larger than the {limit} bytes that this server takes", 413)
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large
    return b"".join(parts)


def parse_json(text: bytes | memoryview | msgspec.Raw, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the request cannot be read: {error}") from None


def json_response(value: Any, status: int = 200) -> Response:
    """Numpy arrays become lists; a NaN becomes null."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json"
    )


def error_fields(error: ProtocolError) -> tuple[str, str, bool]:
    """Its code, its text, and whether trying again may help."""
    code = CODES.get(error.status, "invalid_request" if error.category == "user" else "internal_error")
    return code, str(error), error.status in RETRYABLE


def error_response(error: ProtocolError) -> Response:
    code, message, retryable = error_fields(error)
    return json_response({"error": code, "message": message, "retryable": retryable}, error.status)


async def unknown_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return error_response(
        ProtocolError(f"this server does not offer {request.method} {request.url.path}", status)
    )
