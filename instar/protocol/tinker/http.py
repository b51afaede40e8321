"""Requests and answers, and how a failure reads.

Tinker's clients try 408, 409, 429 and 5xx again, for minutes; 404 and 422 they raise at once. So a sequence
id that is taken, which trying again does not mend, is a 422 here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from instar.protocol.base import ProtocolError
from instar.protocol.errors import to_protocol_error
from instar.protocol.tinker.auth import TinkerKeyStore
from instar.protocol.tinker.requests import parse_json

BODY_SECONDS = 60.0
"""Until a request's body has to be there."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TinkerRequest:
    """One request of an owner."""

    http: Request
    owner: str
    body: bytes

    def parse(self, kind: type[T]) -> T:
        return parse_json(self.body, kind)

    def path_param(self, name: str) -> str:
        """Of the path."""
        return str(self.http.path_params[name])

    def query_int(self, name: str, default: int) -> int:
        """Of the query."""
        text = self.http.query_params.get(name, str(default))
        if not text.isdecimal():
            raise ProtocolError(f"{name} has to be a number, not {text!r}")
        return int(text)

    @property
    def idempotency_key(self) -> str | None:
        """The same request sent again has the same one."""
        return self.http.headers.get("x-idempotency-key")


TinkerHandler = Callable[[TinkerRequest], Awaitable[Response]]


class TinkerRouter:
    """Endpoints under ``/api/v1``, each behind a key."""

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
                return await handler(TinkerRequest(http, owner, await self._body(http)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the client has to be told
                return error_response(to_protocol_error(error))

        self.routes.append(Route(f"/api/v1/{path}", endpoint, methods=[method]))

    async def _body(self, http: Request) -> bytes:
        if http.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError("compressed requests are not taken", 415)
        parts = list[bytes]()
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in http.stream():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_body:
                        raise ProtocolError(
                            f"the request is larger than the {self._max_body} bytes taken here", 413
                        )
        except TimeoutError as error:
            raise ProtocolError("the request's body did not arrive in time", 408) from error
        return b"".join(parts)


def json_response(value: Any, status: int = 200) -> Response:
    """JSON. Numpy arrays become lists, and NaN becomes null."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json"
    )


def error_response(error: ProtocolError) -> Response:
    status = 422 if error.status == 409 else error.status
    return json_response({"detail": str(error), "category": error.category}, status)


async def unknown_route(http: Request, error: Exception) -> Response:
    """What no route takes."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    return error_response(ProtocolError(f"this server does not offer {http.method} {http.url.path}", status))
