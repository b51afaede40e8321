"""Requests, responses and errors of Weaver's protocol.

The body of an error is ``{"error": <code>, "message", "retryable"}``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from instar.protocol.base import ProtocolError
from instar.protocol.errors import to_protocol_error
from instar.protocol.http import KeyStore, json_response, parse_json, read_body, unknown_route_error

KEY_HEADER = "X-WEAVER-API-KEY"
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
    """An authenticated request. ``path_params`` are the parts of the path that matched the route's
    pattern."""

    owner: str
    path_params: dict[str, str]
    content_type: str
    body: bytes
    call_id: str | None
    """The trace context. The SDK repeats it when it retries a call, and never uses it for a different
    call."""

    @property
    def media_type(self) -> str:
        return self.content_type.partition(";")[0].strip().lower()

    def parse(self, shape: type[T]) -> T:
        if self.media_type != JSON:
            raise ProtocolError(f"only training passes may be sent as {self.media_type}; send {JSON}", 415)
        return parse_json(self.body or b"{}", shape)


WeaverHandler = Callable[[WeaverRequest], Awaitable[Response]]


def make_endpoint(
    handler: WeaverHandler, keys: KeyStore, max_body: int
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(http: Request) -> Response:
        try:
            request = WeaverRequest(
                owner=keys.authenticate(http.headers),
                path_params=http.path_params,
                content_type=http.headers.get("content-type", JSON),
                body=await read_body(http, max_body),
                call_id=http.headers.get("traceparent"),
            )
            if request.media_type not in (JSON, MULTIPART):
                raise ProtocolError(
                    f"content-type: received {request.media_type!r}; supported: {JSON}, {MULTIPART}", 415
                )
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - every error becomes a response to the client
            return error_response(to_protocol_error(error))

    return handle


def error_fields(error: ProtocolError) -> tuple[str, str, bool]:
    """Return the error's code and text, and True if a retry may help."""
    code = CODES.get(error.status, "invalid_request" if error.category == "user" else "internal_error")
    return code, str(error), error.status in RETRYABLE


def error_response(error: ProtocolError) -> Response:
    code, message, retryable = error_fields(error)
    return json_response({"error": code, "message": message, "retryable": retryable}, error.status)


async def unknown_route(http: Request, error: Exception) -> Response:
    return error_response(unknown_route_error(http, error))
