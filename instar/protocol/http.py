"""HTTP code shared by the Tinker and Weaver protocols: routes, API keys, request bodies and JSON."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from instar.http.auth import find_key_hash, hash_key
from instar.protocol.base import ProtocolError, to_protocol_error

T = TypeVar("T")
_SEQUENCE_ID_PATTERN = re.compile(rb'"seq_id"\s*:\s*(\d{1,18})\b')


class KeyStore:
    """The API keys that a server accepts. The hash of a key is the ``owner`` of its sessions."""

    def __init__(self, keys: Iterable[str], header: str) -> None:
        self._header = header
        self._hashes = [hash_key(key) for key in keys]

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the owner of the API key. Raises ProtocolError 401 if the key is missing or invalid."""
        key = headers.get(self._header, "").strip()
        if not key:
            raise ProtocolError(f"the API key is missing; send it in the {self._header} header", 401)
        owner = self._find_owner(key)
        if owner is None:
            raise ProtocolError(f"the API key in the {self._header} header is not valid for this server", 401)
        return owner

    def _find_owner(self, key: str) -> str | None:
        return find_key_hash(key, self._hashes)


class ProtocolRouter(Generic[T]):
    """Registers routes under ``/api/v1`` that require an API key. ``parse_request`` builds the handlers'
    request from the HTTP request and its owner. ``error_response`` builds the response for an error."""

    def __init__(
        self,
        key_store: KeyStore,
        parse_request: Callable[[Request, str], Awaitable[T]],
        error_response: Callable[[ProtocolError], Response],
    ) -> None:
        self._key_store = key_store
        self._parse_request = parse_request
        self._error_response = error_response
        self._routes: list[Route] = []

    def add(self, method: str, path: str, handler: Callable[[T], Awaitable[Response]]) -> None:
        async def endpoint(http_request: Request) -> Response:
            try:
                owner = self._key_store.authenticate(http_request.headers)
                return await handler(await self._parse_request(http_request, owner))
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # noqa: BLE001 - every error becomes a response to the client
                return self._error_response(to_protocol_error(error))

        self._routes.append(Route(f"/api/v1/{path}", endpoint, methods=[method]))

    def create_app(self, *public_routes: Route) -> Starlette:
        routes = [*public_routes, *self._routes]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._handle_unsupported_route})
        app.router.redirect_slashes = False  # A redirect would go to the host in the Host header.
        return app

    async def _handle_unsupported_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self._error_response(
            ProtocolError(f"this server does not support {request.method} {request.url.path}", status)
        )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request body. Raises ProtocolError 413 if it is larger than ``max_bytes``."""
    size_error = ProtocolError(f"the request body exceeds the limit of {max_bytes} bytes", 413)
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise size_error
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise size_error
    return b"".join(parts)


def parse_json(body: bytes | memoryview | msgspec.Raw, message_type: type[T]) -> T:
    """Decode JSON into ``message_type``. Raises ProtocolError if the JSON or a field is invalid."""
    try:
        return msgspec.json.decode(body, type=message_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the request cannot be parsed: {error}") from None


def find_sequence_id(body: bytes) -> int | None:
    """Return the first ``seq_id`` in a body that may be invalid JSON, or None if there is none."""
    match = _SEQUENCE_ID_PATTERN.search(body)
    return int(match[1]) if match else None


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON response. NumPy arrays become lists. NaN and infinity become null."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json"
    )
