"""Generate model calls at a fixed rate or with a fixed concurrency, and record their outcomes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
from gateway_parts.load import SMALL, Target, make_body

from instar.http.plain import PlainClient

TICK_SECONDS = 0.005
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
    """Sends requests over as many connections as needed."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._http = PlainClient(address.hostname, address.port, idle_timeout=60, connect_timeout=60)

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
        started_at = time.perf_counter()
        try:
            async with asyncio.timeout(abandon_after_seconds):
                response = await self._http.post(path, headers, body)
                try:
                    received = await response.read()
                finally:
                    response.close()
        except (OSError, TimeoutError, aiohttp.ClientError):
            return Outcome(started_at, time.perf_counter(), 0), b""
        outcome = Outcome(
            started_at,
            time.perf_counter(),
            response.status,
            find_reply_id(received) if response.status == 200 else None,
            "Retry-After" in response.headers,
        )
        return outcome, received

    def close(self) -> None:
        self._http.close()


def find_reply_id(body: bytes) -> str | None:
    """Return the id of a reply, streamed or not. Return None if the end of the stream is missing."""
    if body.startswith(b"data:") and not body.rstrip().endswith(b"[DONE]"):
        return None
    match = REPLY_ID.search(body)
    return match[1].decode() if match else None


class ChatRequests:
    """Sends unique 1 KB chat requests, round-robin over a gateway's sessions."""

    def __init__(self, target: Target, client: LoadClient, *, stream: bool) -> None:
        self._target = target
        self._client = client
        self._prefix, rest = make_body(SMALL, stream).split("@SESSION@")
        self._middle, self._suffix = rest.split("@NONCE@")
        self._count = 0

    async def send_next(self) -> Outcome:
        number = self._count % len(self._target.sessions)
        self._count += 1
        path, key = self._target.sessions[number]
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        body = f"{self._prefix}{number:08d}{self._middle}{self._count:010d}{self._suffix}"
        outcome, _ = await self._client.send(path, headers, body.encode())
        return outcome


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
