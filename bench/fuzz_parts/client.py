"""A minimal HTTP client on raw sockets that sends arbitrary bytes and parses the responses."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from dataclasses import dataclass
from typing import cast

from fuzz_parts.tricks import Script

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_TYPE = re.compile(rb"\r\ncontent-type: *([^\r]*)", re.IGNORECASE)
SLOW_RECEIVE_BUFFER = 4096


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response."""

    status: int
    content_type: bytes
    body: bytes
    is_last: bool
    """True if the server closes the connection after this response."""


class ProtocolViolation(Exception):
    """The server sent something that is not valid HTTP."""


class Connection(asyncio.Protocol):
    """A connection that parses responses as they arrive."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.replies: list[Reply] = []
        self.is_closed = False
        self.violation: str | None = None
        self.is_head_request = False
        """True if the method is HEAD, so that responses have no body."""
        self._buffer = bytearray()
        self._expected = 0
        self._waiter: asyncio.Future[None] | None = None
        self._body_start = 0
        """The position after the head of the current response, or 0 if the head is incomplete."""
        self._position = 0
        """The position up to which the chunks of the current body are parsed."""
        self._chunks: list[bytes] = []
        self._ends_with_connection = False
        """True if the current response ends when the connection closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._ends_with_connection:
            self._add_reply(bytes(self._buffer[: self._body_start]), bytes(self._buffer[self._body_start :]))
        self._wake()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while self._buffer and self._parse():
                pass
        except (ProtocolViolation, ValueError) as error:
            self.violation = str(error)
            self.transport.abort()
        if len(self.replies) >= self._expected:
            self._wake()

    async def wait(self, expected: int, deadline: float) -> bool:
        """Wait until there are ``expected`` responses or the connection closes.

        Return False if neither happens before ``deadline`` (in ``time.monotonic()`` time).
        """
        if len(self.replies) >= expected or self.is_closed:
            return True
        self._expected = expected
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._wake)
        await self._waiter
        timer.cancel()
        return len(self.replies) >= expected or self.is_closed

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _parse(self) -> bool:
        """Parse the current response. Return False if it is incomplete. Raises ProtocolViolation."""
        buffer = self._buffer
        if not self._body_start:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > 12 and not _STATUS.match(buffer):
                    raise ProtocolViolation(f"not an HTTP response: {bytes(buffer[:40])!r}")
                return False
            self._body_start = self._position = end + 4
        head = bytes(buffer[: self._body_start])
        match = _STATUS.match(head)
        if match is None:
            raise ProtocolViolation(f"not an HTTP response: {head[:40]!r}")
        status = int(match[1])
        if 100 <= status < 200:
            self._discard_response(self._body_start)
            return True
        end, body = self._parse_body(head, status)
        if end is None:
            return False
        self._add_reply(head, body)
        self._discard_response(end)
        return True

    def _add_reply(self, head: bytes, body: bytes) -> None:
        status, content_type = _STATUS.match(head), _TYPE.search(head)
        assert status is not None
        is_last = self._ends_with_connection or bool(_CLOSE.search(head))
        self.replies.append(Reply(int(status[1]), content_type[1] if content_type else b"", body, is_last))

    def _parse_body(self, head: bytes, status: int) -> tuple[int | None, bytes]:
        """Return the end of the current response and its body. The end is None if the body is incomplete."""
        start, buffer = self._body_start, self._buffer
        if self.is_head_request and _CLOSE.search(head):
            self._ends_with_connection = True  # a server that could not parse the method sends a body
            return None, b""
        if self.is_head_request or status in (204, 304):
            return start, b""
        if length := _LENGTH.search(head):
            end = start + int(length[1])
            return (end, bytes(buffer[start:end])) if len(buffer) >= end else (None, b"")
        if not _CHUNKED.search(head):
            self._ends_with_connection = True
            return None, b""
        while True:
            line_end = buffer.find(b"\r\n", self._position)
            if line_end < 0:
                return None, b""
            size = int(bytes(buffer[self._position : line_end]).split(b";")[0], 16)
            end = line_end + 2 + size + 2
            if len(buffer) < end:
                return None, b""
            if buffer[end - 2 : end] != b"\r\n":
                raise ProtocolViolation("a chunk does not end with a line break")
            self._position = end
            if size == 0:
                return end, b"".join(self._chunks)
            self._chunks.append(bytes(buffer[line_end + 2 : end - 2]))

    def _discard_response(self, end: int) -> None:
        del self._buffer[:end]
        self._body_start = self._position = 0
        self._chunks = []


async def connect(host: str, port: int, *, is_slow: bool = False) -> Connection:
    """Open a connection. With ``is_slow``, its receive buffer is small, so that the server's writes block."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_RECEIVE_BUFFER)
    try:
        await loop.sock_connect(sock, (host, port))
    except BaseException:  # including cancellation: the socket has no other owner yet
        sock.close()
        raise
    _, connection = await loop.create_connection(Connection, sock=sock)
    return connection


async def run_script(connection: Connection, script: Script, timeout_seconds: float) -> bool:
    """Execute the steps, then wait for the responses and close the connection.

    Return False if the server neither sends the next response nor closes the connection within the timeout.
    """
    transport = connection.transport
    for step in script.steps:
        if connection.is_closed:
            break
        match step.kind:
            case "send":
                transport.write(step.data)
            case "sleep":
                await asyncio.sleep(step.seconds)
            case "pause_reading":
                transport.pause_reading()
            case "resume_reading":
                transport.resume_reading()
            case "end_of_input":
                if not transport.is_closing():
                    transport.write_eof()
            case "abort":
                transport.abort()
    is_done = True
    for count in range(1, max(1, script.responses) + 1):
        is_done = is_done and await connection.wait(count, time.monotonic() + timeout_seconds)
    transport.abort()
    return is_done
