"""HTTP connections that limit request headers, reject calls at capacity, and report disconnects.

Uvicorn limits neither the size of the headers nor the time until they arrive. The app gets the connection
from its scope (`get_connection`), because a callback on disconnect is faster than a task that waits for one.

Clients may pipeline requests. These are parsed as they arrive and handled in order, so the last parsed
request (``cycle``) may be ahead of the one being handled (``_active``).
"""

from __future__ import annotations

import asyncio
import math
import re
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

RejectEarly = Callable[[bytes], bytes | None]
"""Given the data at the start of a request, returns a complete response that rejects it, or None."""

_REJECTION_TEMPLATE = b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
_MAX_PIPELINED = 16
"""Reading from a connection pauses while this many of its requests are waiting."""
_EXTENSION_NAME = "instar.connection"
# Requests in this form have the same meaning for every HTTP parser.
_PLAIN_POST = re.compile(rb"POST ([!-$&->@-~]+)(?:\?[!-~]*)? HTTP/1\.1")
_PLAIN_HEADERS = re.compile(rb"(?:\r\n[!#$%&'*+.^_`|~0-9a-z-]+:[^\x00-\x08\x0a-\x1f\x7f]*)+")
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?=\r\n|\Z)", re.IGNORECASE)
_SPECIAL_HEADERS = (b"\r\ncontent-length", b"\r\ntransfer-encoding", b"\r\nexpect", b"\r\nupgrade")
_MAX_PLAIN_HEADS, _MAX_PLAIN_HEAD = 1024, 4096
"""The number of request heads for which `find_post_path` caches the path, and their maximum size in bytes."""
_CLOSING_HEADER = re.compile(rb"\r\n(?:proxy-)?connection:(?![ \t]*keep-alive[ \t]*(?:\r\n|\Z))")


def get_connection(scope: Scope) -> LimitedHttpProtocol | None:
    """Return a request's connection, or None if it is closed or of a different protocol class."""
    reference = scope.get("extensions", {}).get(_EXTENSION_NAME)
    return None if reference is None else reference()


class LimitedHttpProtocol(HttpToolsProtocol):
    max_head = 1 << 20
    """The maximum size of the request line and headers, in bytes."""
    head_timeout = 60.0
    """The time within which the request headers must arrive, in seconds."""
    reject_early: RejectEarly | None = None
    """Called with the first data of each request before it is parsed, so that rejections are cheap."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_size = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._rejected_at = -math.inf
        """The loop's time at the last early rejection."""
        self._active: RequestResponseCycle | None = None
        # The scope of a request refers to its connection weakly. In a cycle of references, every closed
        # connection would wait for the garbage collector, and fragment the memory until then.
        self._extensions = {_EXTENSION_NAME: weakref.ref(self)}
        self._rejection: bytes | None = None
        """An error response to send after all earlier responses, before the connection is closed."""
        self.on_disconnect: Callable[[], None] | None = None
        """Called when the connection is lost. Set only while a model call is being handled."""

    @property
    def has_complete_body(self) -> bool:
        """True if the complete body of the request being handled has arrived."""
        return self._active is not None and not self._active.more_body

    def send_response(self, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Write a complete response with status 200, unless a response has begun or the client is gone."""
        cycle = self._active
        if cycle is None or cycle.disconnected or cycle.response_started:
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
    def with_limits(
        cls, max_head: int, head_timeout: float, reject_early: RejectEarly | None = None
    ) -> type[LimitedHttpProtocol]:
        limits: dict[str, Any] = {"max_head": max_head, "head_timeout": head_timeout}
        if reject_early is not None:
            limits["reject_early"] = staticmethod(reject_early)
        return type(cls.__name__, (cls,), limits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reset_head()
        self.pipeline.clear()
        if self._active is not None:
            self._active.disconnected = True
            self._active.message_event.set()
        if self.on_disconnect is not None:
            self.on_disconnect()
            self.on_disconnect = None
        super().connection_lost(exc)
        self.cycle = self._active = None  # type: ignore[assignment]  # they refer to this connection

    def data_received(self, data: bytes) -> None:
        if self._rejection is not None:
            return
        response = None
        # A client that does not read its responses must not fill the write buffer.
        if self.reject_early is not None and not self.flow.write_paused and self._is_between_requests:
            response = self.reject_early(data)
        if response is not None:
            self.transport.write(response)
            self._reset_head()
            self._rejected_at = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self.on_response_complete()  # starts the keep-alive timeout
            return
        was_in_head = self._is_in_head
        super().data_received(data)
        if not self._is_in_head or self._rejection is not None:
            return
        if was_in_head:  # Otherwise part of the data belongs to an earlier request.
            self._head_size += len(data)
        if self._head_size > self.max_head:
            self._reject(b"431 Request Header Fields Too Large")
        elif self._head_timer is None:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]  # not dicts

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._reset_head()
        super().on_headers_complete()
        if len(self.pipeline) < _MAX_PIPELINED:
            self.flow.resume_reading()  # Otherwise a disconnect would not be noticed.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._send_rejection()

    def timeout_keep_alive_handler(self) -> None:
        # A new timer for every early rejection would take a third of its time.
        remaining = self._rejected_at + self.timeout_keep_alive - self.loop.time()
        if remaining > 0:
            self.timeout_keep_alive_task = self.loop.call_later(remaining, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # The rest of this request's body is malformed.
        self._reject(b"400 Bad Request", msg.encode())

    @property
    def _is_between_requests(self) -> bool:
        """True if all earlier requests have their responses and no part of the next one has arrived."""
        if self._active is None:
            return self._head_size == 0
        last = self.cycle
        return not self._is_in_head and last.response_complete and not last.more_body

    @property
    def _is_busy(self) -> bool:
        """True if a request with a complete body is being handled."""
        active = self._active
        return active is not None and not active.response_complete and not active.more_body

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        if self._is_busy:
            self._start_head_timer()  # The headers may be unread because too many requests are waiting.
        else:
            self._reject(b"408 Request Timeout")

    def _reset_head(self) -> None:
        self._head_size = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _reject(self, status: bytes, message: bytes = b"") -> None:
        self._reset_head()
        self._rejection = _REJECTION_TEMPLATE % (status, len(message), message)
        self._send_rejection()

    def _send_rejection(self) -> None:
        if self._rejection is not None and not self._is_busy and not self.transport.is_closing():
            self.transport.write(self._rejection)
            self.transport.close()


def find_post_path(data: bytes) -> bytes | None:
    """Return the path if ``data`` is exactly one complete POST request in a plain form. Return None for other
    data, which must be parsed."""
    head, separator, body = data.partition(b"\r\n\r\n")
    length = _CONTENT_LENGTH.search(head)
    if not separator or length is None or length[1] != b"%d" % len(body) or len(head) > _MAX_PLAIN_HEAD:
        return None
    return _find_plain_path(head[: length.start()] + head[length.end() :])


@lru_cache(_MAX_PLAIN_HEADS)
def _find_plain_path(head: bytes) -> bytes | None:
    """Return the path of a plain POST request with this request line and these headers, without the length of
    the body. Return None for other requests. A client's requests usually differ only in the length."""
    line, _, headers = head.partition(b"\r\n")
    headers = b"\r\n" + headers.lower()
    match = _PLAIN_POST.fullmatch(line)
    if match is None or not _PLAIN_HEADERS.fullmatch(headers) or _CLOSING_HEADER.search(headers):
        return None
    return None if any(name in headers for name in _SPECIAL_HEADERS) else match[1]
