"""Generate model calls at a fixed rate or with a fixed concurrency, and record their outcomes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from gateway_parts.load import SMALL, Target, make_body

TICK_SECONDS = 0.005
CALLS_PER_SESSION = 32
HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n(?s:.*?\r\n)?\r\n")
"""Matches the field in complete headers."""
REPLY_ID = re.compile(rb'"id": ?"([^"]+)"')
SendCall = Callable[[], Awaitable["Outcome"]]


@dataclass(frozen=True, slots=True)
class Outcome:
    started_at: float
    ended_at: float
    status: int
    """The status code, or 0 if the connection was lost before the response was complete."""
    reply_id: str | None = None
    """The id of a reply that arrived completely and must therefore be in the store."""
    has_retry_after: bool = False

    @property
    def milliseconds(self) -> float:
        return 1000 * (self.ended_at - self.started_at)


class LoadClient:
    """Sends requests over as many connections as needed.

    It uses little CPU time per request, which it would take from the gateway on the same machine: a
    response is complete when as many bytes as its Content-Length, or its last chunk, have arrived.
    """

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._address = address.hostname, address.port
        self._host = address.netloc
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def send(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        abandon_after_seconds: float | None = None,
    ) -> tuple[Outcome, bytes]:
        """Send a request and return its outcome and the response body.

        The client disconnects if there is no complete response after ``abandon_after_seconds``. If the
        connection is lost, the status is 0 and the body empty.
        """
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}\r\n{fields}\r\n"
        started_at = time.perf_counter()
        try:
            exchange = self._exchange(head.encode() + body)
            response = await asyncio.wait_for(exchange, abandon_after_seconds)
        except (OSError, TimeoutError):
            return Outcome(started_at, time.perf_counter(), 0), b""
        ended_at = time.perf_counter()
        response_head, _, received = response.partition(HEAD_END)
        if b"transfer-encoding: chunked" in response_head:
            received = join_chunks(received)
        status = int(response_head[9:12])
        reply_id = find_reply_id(received) if status == 200 else None
        return Outcome(started_at, ended_at, status, reply_id, b"\nretry-after: " in response_head), received

    async def _exchange(self, request: bytes) -> bytes:
        """Send a request and return the complete response. Disconnect if this is cancelled."""
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            response = await connection.send(request)
        except BaseException:  # including cancellation, which is how a client abandons its call
            connection.transport.abort()
            raise
        if not connection.transport.is_closing():
            self._idle.append(connection)
        return response

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._idle, self._open), *self._address
        )
        return connection

    def close(self) -> None:
        for connection in [*self._open]:
            connection.transport.abort()


class _Connection(asyncio.Protocol):
    """A connection that handles one request at a time and is in ``idle`` between requests."""

    def __init__(self, idle: list[_Connection], open_connections: set[_Connection]) -> None:
        self._idle, self._open = idle, open_connections
        self._received = b""
        self._size: int | None = None
        """The size of the response in bytes, or None if its headers are incomplete or it is chunked."""
        self._response: asyncio.Future[bytes] | None = None

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        self._received, self._size = b"", None
        self._response = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._response

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._size is None and (match := CONTENT_LENGTH.search(self._received)):
            self._size = self._received.index(HEAD_END) + len(HEAD_END) + int(match[1])
        is_complete = (
            self._received.endswith(LAST_CHUNK) if self._size is None else len(self._received) >= self._size
        )
        if is_complete and self._response is not None and not self._response.done():
            self._response.set_result(self._received)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._response is not None and not self._response.done():
            self._response.set_exception(ConnectionResetError("the connection was closed"))


def join_chunks(body: bytes) -> bytes:
    """Return the content of a complete chunked body."""
    parts: list[bytes] = []
    while body:
        size_line, _, body = body.partition(b"\r\n")
        size = int(size_line, 16)
        parts.append(body[:size])
        body = body[size + 2 :]
    return b"".join(parts)


def find_reply_id(body: bytes) -> str | None:
    """Return the id of a reply, streamed or not. Return None if the end of the stream is missing."""
    if body.startswith(b"data:") and not body.rstrip().endswith(b"[DONE]"):
        return None
    match = REPLY_ID.search(body)
    return match[1].decode() if match else None


class ChatRequests:
    """Sends unique 1 KB chat requests, round-robin over a gateway's sessions. A session is replaced by a new
    one after CALLS_PER_SESSION replies, because the sessions of agents end, too."""

    def __init__(self, target: Target, client: LoadClient, admin_key: str, *, stream: bool) -> None:
        self._client = client
        self._sessions = list(target.sessions)
        self._reply_counts = [0] * len(self._sessions)
        self._admin_headers = {"authorization": f"Bearer {admin_key}"}
        self._prefix, rest = make_body(SMALL, stream).split("@SESSION@")
        self._middle, self._suffix = rest.split("@NONCE@")
        self._count = 0

    async def send_next(self) -> Outcome:
        number = self._count % len(self._sessions)
        self._count += 1
        body = f"{self._prefix}{number:08d}{self._middle}{self._count:010d}{self._suffix}"
        if self._reply_counts[number] >= CALLS_PER_SESSION:
            self._reply_counts[number] = 0
            await self._replace_session(number)
        path, key = self._sessions[number]
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        outcome, _ = await self._client.send(path, headers, body.encode())
        self._reply_counts[number] += outcome.status == 200
        return outcome

    async def _replace_session(self, number: int) -> None:
        outcome, body = await self._client.send("/sessions", self._admin_headers, b"{}")
        if outcome.status == 201:
            self._sessions[number] = self._sessions[number][0], json.loads(body)["api_key"]


class LoadGenerator:
    """Starts calls in phases and collects their outcomes, even if a call ends after its phase."""

    def __init__(self, send: SendCall) -> None:
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: list[Outcome] = []
        self.timer_lags: list[float] = []
        """The delays of this process's timers in seconds. Measured latencies are valid only if these are
        short."""

    async def run_at_rate(self, rate: float, seconds: float) -> tuple[float, float]:
        """Start calls at this rate per second, whether or not earlier calls have ended.

        Return the start and end of the phase, without waiting for the calls.
        """
        started_at = now = previous = time.perf_counter()
        started_calls = 0
        while now - started_at < seconds:
            due_calls = int((now - started_at) * rate)
            while started_calls < due_calls:
                started_calls += 1
                task = asyncio.create_task(self._send_and_record())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(TICK_SECONDS)
            now, previous = time.perf_counter(), now
            self.timer_lags.append(now - previous - TICK_SECONDS)
        return started_at, now

    async def run_concurrently(self, concurrency: int, seconds: float) -> tuple[float, float]:
        """Keep ``concurrency`` calls in flight for ``seconds``.

        Return the start of the phase and the end of the last call.
        """
        started_at = time.perf_counter()

        async def call_repeatedly() -> None:
            while time.perf_counter() - started_at < seconds:
                await self._send_and_record()

        await asyncio.gather(*(call_repeatedly() for _ in range(concurrency)))
        return started_at, time.perf_counter()

    async def finish(self, timeout_seconds: float = 120.0) -> None:
        """Wait for the calls that are still in flight, and cancel them when the timeout expires."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=timeout_seconds)
            for task in pending:
                task.cancel()

    async def _send_and_record(self) -> None:
        outcome = await self._send()
        self.outcomes.append(outcome)  # read `outcomes` after the call: the list may be replaced during it


def count_replies(outcomes: list[Outcome], started_at: float, ended_at: float) -> int:
    """Return the number of successful calls that ended within the phase."""
    return sum(outcome.status == 200 and started_at <= outcome.ended_at < ended_at for outcome in outcomes)


def percentile(values: list[float], fraction: float) -> float:
    """Return the value below which this fraction of the values lies, or 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0
