"""A small HTTP/1.1 client without TLS for engines and providers on the same network, such as vLLM and Ollama.

It is several times faster than aiohttp, which would account for most of the gateway's time per request.
Incomplete or invalid responses raise aiohttp's exceptions, so callers can treat both clients alike. Failed
connection attempts raise OSError or TimeoutError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast

import httptools
from aiohttp import ClientPayloadError, ServerDisconnectedError
from multidict import CIMultiDict

MAX_UNREAD_BYTES = 1 << 18
"""Reading from the connection pauses while a response has more unread bytes than this."""


class PlainClient:
    def __init__(self, host: str, port: int, *, idle_timeout: float, connect_timeout: float) -> None:
        self._host, self._port = host, port
        self._idle_timeout = idle_timeout
        self._connect_timeout = connect_timeout
        name = f"[{host}]" if ":" in host else host
        self._host_header = name if port == 80 else f"{name}:{port}"
        self._idle_connections: list[_Connection] = []
        self._open_connections: set[_Connection] = set()

    async def post(self, target: str, headers: Mapping[str, str], body: bytes) -> PlainResponse:
        """Send a request, and return its response as soon as the status and headers have arrived."""
        connection = self._pop_idle() or await self._connect()
        return await connection.send(self._build_head(target, headers, len(body)), body)

    def close(self) -> None:
        """Abort all connections, including connections with a response in progress."""
        for connection in [*self._open_connections]:
            connection.transport.abort()

    def _build_head(self, target: str, headers: Mapping[str, str], length: int) -> bytes:
        lines = [f"POST {target} HTTP/1.1", f"host: {self._host_header}", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1:
            raise ValueError("the request target, a header name or a header value contains a line break")
        return head.encode() + b"\r\n\r\n"

    def _pop_idle(self) -> _Connection | None:
        while self._idle_connections:
            connection = self._idle_connections.pop()
            if time.monotonic() - connection.idle_since < self._idle_timeout and connection.is_usable:
                return connection
            connection.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._idle_connections, self._open_connections), self._host, self._port
            )
        return connection


class _Connection(asyncio.Protocol):
    """A connection that handles one request at a time and is in ``idle_connections`` between requests."""

    def __init__(self, idle_connections: list[_Connection], open_connections: set[_Connection]) -> None:
        self._idle_connections = idle_connections
        self._open_connections = open_connections
        self.idle_since = 0.0
        self._response: PlainResponse | None = None
        self._parser: Any = None

    @property
    def is_usable(self) -> bool:
        """True if the connection is open and the last request was sent completely."""
        return not self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    async def send(self, head: bytes, body: bytes) -> PlainResponse:
        self._response = response = PlainResponse(self)
        self._parser = httptools.HttpResponseParser(self)
        self.transport.writelines([head, body])
        try:
            await response.started
        except asyncio.CancelledError:
            # Not transport.abort(): if the response is complete, another request may use the connection.
            response.close()
            raise
        return response

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._response is None:  # the server sent data without a request
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ClientPayloadError(f"the response is not valid HTTP: {error}"))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections.discard(self)
        if self in self._idle_connections:
            self._idle_connections.remove(self)
        self._parser = None  # it refers to this connection, which should not wait for the garbage collector
        response = self._response
        if response is None:
            return
        if response.ends_on_close and exc is None:
            self._response = None
            response.finish()
        else:
            payload_error = ClientPayloadError(str(exc or "the server closed the connection early"))
            self._fail(payload_error if response.status else ServerDisconnectedError())

    def _fail(self, error: Exception) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.finish(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._response is not None
        self._response.headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        assert self._response is not None
        status: int = self._parser.get_status_code()
        if status < 200:
            self._response.headers.clear()
        else:
            self._response.start(status)

    def on_body(self, body: bytes) -> None:
        assert self._response is not None
        self._response.append(body)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status:
            return
        self._response = None
        if self._parser.should_keep_alive() and self.is_usable:
            self.transport.resume_reading()
            self.idle_since = time.monotonic()
            self._idle_connections.append(self)
        else:
            self.transport.close()
        response.finish()


class PlainResponse:
    """A response with the subset of aiohttp's ClientResponse methods that callers use."""

    def __init__(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.started: asyncio.Future[None] = loop.create_future()
        self.closed = False
        """True if no more data will arrive."""
        self.received = 0
        """The number of bytes that have arrived, including unread bytes."""
        self._connection = connection
        self._parts: list[bytes] = []
        self._unread_bytes = 0
        self._is_paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content(self) -> PlainResponse:
        return self

    @property
    def ends_on_close(self) -> bool:
        """True if the body ends when the server closes the connection, because no header gives its length."""
        headers = self.headers
        return self.status != 0 and "content-length" not in headers and "transfer-encoding" not in headers

    async def read(self) -> bytes:
        parts: list[bytes] = []
        while part := await self.readany():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def readany(self) -> bytes:
        """Wait for data and return the unread bytes, or ``b""`` at the end of the body."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.closed:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread_bytes = 0
        if self._is_paused:
            self._is_paused = False
            self._connection.transport.resume_reading()
        return data

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._connection.transport.abort()

    def start(self, status: int) -> None:
        self.status = status
        if not self.started.done():
            self.started.set_result(None)

    def append(self, part: bytes) -> None:
        self._parts.append(part)
        self._unread_bytes += len(part)
        self.received += len(part)
        if self._unread_bytes > MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._connection.transport.pause_reading()
        self._wake()

    def finish(self, error: Exception | None = None) -> None:
        self.closed = True
        self._is_paused = False
        if error is not None and not self.started.done():
            self.started.set_exception(error)
        else:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
