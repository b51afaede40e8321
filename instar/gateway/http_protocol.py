"""HTTP connections that limit the headers of a request and report when the client disconnects.

Uvicorn limits neither the size nor the time of the headers. The app gets the connection from its scope
(`get_connection`), because a callback on disconnect is faster than a task that waits for the disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_REFUSAL = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_EXTENSION = "instar.connection"


def get_connection(scope: Scope) -> LimitedHttpProtocol | None:
    """Return the connection of a request, or None if the server uses a different protocol class."""
    return scope.get("extensions", {}).get(_EXTENSION)


class LimitedHttpProtocol(HttpToolsProtocol):
    max_head = 1 << 20
    """The maximum size in bytes of a request line with its headers."""
    head_timeout = 60.0
    """The request headers must arrive within this time, in seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_size = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self.on_disconnect: Callable[[], None] | None = None
        """Called when the client disconnects. Set only while a request is handled."""

    @property
    def has_body(self) -> bool:
        """True if the complete body of the request has arrived."""
        return not self.cycle.more_body

    def send_response(self, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Write a complete response with status 200 in one system call."""
        cycle = self.cycle
        if cycle.disconnected or cycle.response_started:
            return
        cycle.response_started = cycle.response_complete = True
        lines = [b"HTTP/1.1 200 OK"]
        lines += [b"%s: %s" % header for header in (*cycle.default_headers, *headers)]
        lines.append(b"content-length: %d" % len(body))
        if not cycle.keep_alive:
            lines.append(b"connection: close")
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    @classmethod
    def with_limits(cls, max_head: int, head_timeout: float) -> type[LimitedHttpProtocol]:
        return type(cls.__name__, (cls,), {"max_head": max_head, "head_timeout": head_timeout})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reset_head()
        if self.on_disconnect is not None:
            self.on_disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._head_size += len(data)
        if self._head_size > self.max_head:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._head_timer is None:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: self}  # type: ignore[typeddict-item]  # an object

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._reset_head()
        super().on_headers_complete()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout, self._refuse, b"408 Request Timeout")

    def _reset_head(self) -> None:
        self._head_size = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._reset_head()
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL % status)
            self.transport.close()
