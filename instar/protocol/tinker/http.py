"""Requests and error responses of Tinker's protocol.

Tinker's clients retry 408, 409, 429 and 5xx for minutes, and raise 404 and 422 immediately. A retry does not
help when a sequence id is taken, so the server sends 422 instead of 409.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from instar.protocol.base import ProtocolError
from instar.protocol.http import KeyStore, ProtocolRouter, json_response, parse_json, read_body

BODY_TIMEOUT_SECONDS = 60.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TinkerRequest:
    http: Request
    owner: str
    body: bytes

    def parse(self, message_type: type[T]) -> T:
        return parse_json(self.body, message_type)

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


TinkerRouter = ProtocolRouter[TinkerRequest]


def create_router(keys: KeyStore, max_body: int) -> TinkerRouter:
    async def parse_request(http: Request, owner: str) -> TinkerRequest:
        if http.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(
                "compressed request bodies are not supported; send the body without Content-Encoding", 415
            )
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                return TinkerRequest(http, owner, await read_body(http, max_body))
        except TimeoutError as error:
            raise ProtocolError(
                f"the request body did not arrive within {BODY_TIMEOUT_SECONDS:g} s; send it again", 408
            ) from error

    return TinkerRouter(keys, parse_request, _error_response)


def _error_response(error: ProtocolError) -> Response:
    status = 422 if error.status == 409 else error.status
    return json_response({"detail": str(error), "category": error.category}, status)
