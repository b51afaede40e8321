"""Requests, responses and errors of Tinker's protocol.

Tinker's clients retry 408, 409, 429 and 5xx for minutes, and raise 404 and 422 at once. Retrying does not
help when a sequence id is taken, so that is a 422 here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from instar.protocol.base import ProtocolError
from instar.protocol.errors import to_protocol_error
from instar.protocol.http import json_response, parse_json, read_body, unknown_route_error
from instar.protocol.tinker.auth import TinkerKeyStore

BODY_SECONDS = 60.0
"""Seconds within which a request's body must arrive."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TinkerRequest:
    http: Request
    owner: str
    body: bytes

    def parse(self, shape: type[T]) -> T:
        return parse_json(self.body, shape)

    def path_param(self, name: str) -> str:
        return str(self.http.path_params[name])

    def query_int(self, name: str, default: int) -> int:
        text = self.http.query_params.get(name, str(default))
        if not text.isdecimal():
            raise ProtocolError(f"{name}: received {text!r}; it must be a whole number")
        return int(text)

    @property
    def idempotency_key(self) -> str | None:
        return self.http.headers.get("x-idempotency-key")


TinkerHandler = Callable[[TinkerRequest], Awaitable[Response]]


class TinkerRouter:
    """Registers endpoints under ``/api/v1`` that require an API key."""

    def __init__(self, keys: TinkerKeyStore, max_body: int) -> None:
        self._keys = keys
        self._max_body = max_body
        self.routes: list[Route] = []

    def post(self, path: str, handler: TinkerHandler) -> None:
        self._add(path, handler, "POST")

    def get(self, path: str, handler: TinkerHandler) -> None:
        self._add(path, handler, "GET")

    def delete(self, path: str, handler: TinkerHandler) -> None:
        self._add(path, handler, "DELETE")

    def _add(self, path: str, handler: TinkerHandler, method: str) -> None:
        async def endpoint(http: Request) -> Response:
            try:
                owner = self._keys.authenticate(http.headers)
                return await handler(TinkerRequest(http, owner, await self._read_body(http)))
            except Exception as error:  # noqa: BLE001 - every error becomes a response to the client
                return error_response(to_protocol_error(error))

        self.routes.append(Route(f"/api/v1/{path}", endpoint, methods=[method]))

    async def _read_body(self, http: Request) -> bytes:
        if http.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(
                "compressed request bodies are not supported; send the body without Content-Encoding", 415
            )
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await read_body(http, self._max_body)
        except TimeoutError as error:
            raise ProtocolError(
                f"the request body did not arrive within {BODY_SECONDS:g} s; send it again", 408
            ) from error


def error_response(error: ProtocolError) -> Response:
    status = 422 if error.status == 409 else error.status
    return json_response({"detail": str(error), "category": error.category}, status)


async def unknown_route(http: Request, error: Exception) -> Response:
    return error_response(unknown_route_error(http, error))
