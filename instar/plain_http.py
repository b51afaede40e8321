"""A small HTTP/1.1 client without TLS, for engines and providers next door (vLLM, Ollama, ...): it takes a
fraction of the time that a general client spends on a request, which is most of what passing one on costs.

Its failures are aiohttp's errors, so that both clients are handled alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

import httptools
from aiohttp import ClientPayloadError, ServerDisconnectedError
from multidict import CIMultiDict

_HIGH_WATER = 1 << 18
"""Bytes of an answer that may wait to be read before the provider has to."""


class PlainClient:
    def __init__(self, host: str, port: int, *, idle_seconds: float, connect_seconds: float) -> None:
        self._host, self._port = host, port
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        name = f"[{host}]" if ":" in host else host
        self._host_header = name if port == 80 else f"{name}:{port}"
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def post(self, target: str, headers: Mapping[str, str], body: bytes) -> PlainResponse:
        """Returns when the status and the headers have come."""
        connection = self._take() or await self._connect()
        return await connection.ask(self._head(target, headers, len(body)), body)

    def close(self) -> None:
        """What is under way breaks off."""
        for connection in [*self._open]:
            connection.abort()

    def _head(self, target: str, headers: Mapping[str, str], length: int) -> bytes:
        lines = [f"POST {target} HTTP/1.1", f"host: {self._host_header}", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1:
            raise ValueError("a header has a line break in it")
        return head.encode() + b"\r\n\r\n"

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since < self._idle_seconds and connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_seconds):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._idle, self._open), self._host, self._port
            )
        return connection


class _Connection(asyncio.Protocol):
    """Answers one request at a time, and goes to the ``idle`` ones in between."""

    def __init__(self, idle: list[_Connection], all_open: set[_Connection]) -> None:
        self._all_idle = idle
        self._all_open = all_open
        self.idle_since = 0.0
        self._response: PlainResponse | None = None
        self._parser: Any = None

    @property
    def usable(self) -> bool:
        """Whether it is open, and the last request was taken in before it was answered."""
        return not self._transport.is_closing() and self._transport.get_write_buffer_size() == 0

    async def ask(self, head: bytes, body: bytes) -> PlainResponse:
        self._response = response = PlainResponse(self)
        self._parser = httptools.HttpResponseParser(self)
        self._transport.writelines([head, body])
        try:
            await response.begun
        except asyncio.CancelledError:
            self.abort()
            raise
        return response

    def abort(self) -> None:
        self._transport.abort()

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        self._transport.resume_reading()

    # --- asyncio's calls --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._all_open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._response is None:  # words that nobody asked for
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ClientPayloadError(f"not HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all_open.discard(self)
        if self in self._all_idle:
            self._all_idle.remove(self)
        response = self._response
        if response is None:
            return
        if response.ends_with_connection and exc is None:
            self._response = None
            response.finish()
        else:
            self._fail(
                ServerDisconnectedError() if not response.status else ClientPayloadError(str(exc or "cut"))
            )

    def _fail(self, error: Exception) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.fail(error)

    # --- the parser's calls -----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._response is not None
        self._response.headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        assert self._response is not None
        status: int = self._parser.get_status_code()
        if status < 200:
            self._response.headers.clear()
        else:
            self._response.begin(status)

    def on_body(self, body: bytes) -> None:
        assert self._response is not None
        self._response.take(body)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status:
            return
        self._response = None
        if self._parser.should_keep_alive() and self.usable:
            self.resume()
            self.idle_since = time.monotonic()
            self._all_idle.append(self)
        else:
            self._transport.close()
        response.finish()


class PlainResponse:
    """What is used of aiohttp's ClientResponse."""

    def __init__(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.closed = False
        """Nothing more is to come."""
        self.received = 0
        """Bytes that have come, whether they were read or not."""
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content(self) -> PlainResponse:
        return self

    @property
    def ends_with_connection(self) -> bool:
        headers = self.headers
        return self.status != 0 and "content-length" not in headers and "transfer-encoding" not in headers

    async def read(self) -> bytes:
        """All of it."""
        parts: list[bytes] = []
        while part := await self.readany():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def readany(self) -> bytes:
        """What has come; empty at the end."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.closed:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._connection.resume()
        return data

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._connection.abort()

    # --- the connection's calls -------------------------------------------------------------------

    def begin(self, status: int) -> None:
        self.status = status
        if not self.begun.done():
            self.begun.set_result(None)

    def take(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        self.received += len(part)
        if self._size > _HIGH_WATER and not self._paused:
            self._paused = True
            self._connection.pause()
        self._wake()

    def finish(self) -> None:
        self.closed = True
        self._paused = False
        self._wake()

    def fail(self, error: Exception) -> None:
        self.closed = True
        self._paused = False
        if not self.begun.done():
            self.begun.set_exception(error)
        else:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
