"""What comes in, before it is understood: who sends it, its body, and how much there is at once."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from instar.config import GatewayConfig
from instar.gateway.auth import Authenticator, Caller, extract_key
from instar.gateway.base import ApiError


class RequestReader:
    def __init__(self, keys: Authenticator, config: GatewayConfig) -> None:
        self._keys = keys
        self._config = config
        self.in_flight = 0

    @property
    def patience(self) -> float:
        """Seconds that a client has to send a body, or to take the end of a stream."""
        return self._config.read_timeout

    @contextmanager
    def admitted(self) -> Generator[None]:
        """While a request is read and understood; its answer counts itself."""
        if self.in_flight >= self._config.max_in_flight:
            raise ApiError(429, "Too many requests at once.", code="too_many_requests", retry_after=1)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def count(self, change: int) -> None:
        self.in_flight += change

    async def caller(self, http: HttpRequest) -> Caller:
        return await self.identified(http.headers)

    async def identified(self, headers: Mapping[str, str]) -> Caller:
        size = sum(map(len, headers)) + sum(map(len, headers.values()))
        if size > self._config.max_header:
            raise ApiError(431, f"The headers are larger than {self._config.max_header} bytes.")
        return await self._keys.identify(extract_key(headers))

    async def body(self, headers: Mapping[str, str], receive: Receive, *, arrived: bool = False) -> bytes:
        """``arrived``: it is there already, and needs no deadline."""
        limit = self._config.max_body
        if headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "Compressed bodies are not taken.", code="unsupported_encoding")
        if arrived:
            return await _whole_body(receive, limit)
        try:
            async with asyncio.timeout(self.patience):
                return await _whole_body(receive, limit)
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="timeout") from error

    async def body_of(self, http: HttpRequest) -> bytes:
        return await self.body(http.headers, http.receive)


async def _whole_body(receive: Receive, limit: int) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(body) <= limit:
        return body
    return await _rest_of_body(body, receive, limit)


async def _rest_of_body(body: bytes, receive: Receive, limit: int) -> bytes:
    chunks, size, more = [body], len(body), True
    while more and size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The body broke off.", code="invalid_json")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        more = message.get("more_body", False)
    if size > limit:
        raise ApiError(413, f"The body is larger than {limit} bytes.", code="too_large")
    return b"".join(chunks)
