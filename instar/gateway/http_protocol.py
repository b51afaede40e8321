"""HTTP connections whose requests cannot begin for ever, and which tell when their client is gone.

Uvicorn collects the head of a request, however large it is and however slowly it comes. Bodies are the
app's own to limit. The app finds the connection in its scope (`connection`): asking it costs less than a
task that waits for the client to leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_REFUSAL = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


_NAME = "instar.connection"


def get_connection(scope: Scope) -> LimitedHttpProtocol | None:
    """Of a request, where this protocol serves it."""
    return scope.get("extensions", {}).get(_NAME)


class LimitedHttpProtocol(HttpToolsProtocol):
    max_head = 1 << 20
    """Bytes of a request's line and headers."""
    head_timeout = 60.0
    """Seconds from a connection's or a request's first byte to the end of its headers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self.when_gone: Callable[[], None] | None = None
        """Called when the client has gone; set for as long as a request is worked on."""

    @property
    def has_body(self) -> bool:
        """Whether the request's body has come as a whole."""
        return not self.cycle.more_body

    def answer(self, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole answer of status 200, in one write."""
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
        """The protocol with these limits."""
        return type(cls.__name__, (cls,), {"max_head": max_head, "head_timeout": head_timeout})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        if self.when_gone is not None:
            self.when_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._head += len(data)
        if self._head > self.max_head:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._deadline is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {_NAME: self}  # type: ignore[typeddict-item]  # a live object, not data

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_head()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self.head_timeout, self._refuse, b"408 Request Timeout")

    def _forget_head(self) -> None:
        self._head = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: bytes) -> None:
        self._forget_head()
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL % status)
            self.transport.close()
