"""An HTTP proxy before a service that lets requests through, or does to one of them what bad lines do."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web

ID_PATTERN = re.compile(r"\b(session|model|op)-[0-9a-f]+|\bsampling-(?!sessions)[^/]*")
ANY_ENDPOINT = "everywhere"
REQUEST_TYPE = "X-Tinker-Request-Type"
"""Tells what a question for a result is about."""


@dataclass(frozen=True)
class Fault:
    name: str
    times: float = 1
    """Requests that it strikes, one after the other."""
    status: int | None = None
    """Of an answer in the service's place."""
    body: bytes = b""
    content_type: str = "application/json"
    forwards: bool = False
    """Whether the request reaches the service."""
    truncates: bool = False
    """Half of the service's answer arrives, as if that was all."""
    hangs: bool = False
    """No answer comes; otherwise, where there is none, the connection is cut."""


FAULTS = [
    Fault("503", times=2, status=503, body=b'{"error": "unavailable", "message": "m", "retryable": true}'),
    Fault("429", times=2, status=429, body=b'{"error": "rate_limited", "message": "m", "retryable": true}'),
    Fault("502", times=2, status=502, body=b"<html>bad gateway", content_type="text/html"),
    Fault("cut before"),
    Fault("cut after", forwards=True),
    Fault("truncated", forwards=True, truncates=True),
    Fault("HTML", status=200, body=b"<html>log in first", content_type="text/html"),
    Fault("nonsense", status=200, body=b'{"nothing": "of use"}'),
    Fault("no answer", hangs=True),
    Fault("late", forwards=True, hangs=True),
]
TRANSIENT_FAULTS = ("503", "429", "502", "cut before", "cut after")
"""Faults that a client is to get over by itself."""
PERMANENT_FAULTS = [
    replace(fault, times=float("inf")) for fault in FAULTS if fault.name in ("503", "cut before", "no answer")
]


class FaultyProxy:
    """``places`` counts the requests by what they ask for. A fault strikes at one place, or everywhere, from
    the given request on."""

    def __init__(self, url: str, place: str = "", fault: Fault | None = None, after: int = 0) -> None:
        self._target_url = url
        self._endpoint = place
        self._fault = fault
        self._after = after
        self._remaining = fault.times if fault else 0.0
        self.request_counts: Counter[str] = Counter()
        self.fault_count = 0
        self.url = ""

    def disable_fault(self) -> None:
        self._remaining = 0

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[FaultyProxy]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        async with aiohttp.ClientSession(auto_decompress=False) as self._client:
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self._next_fault(_endpoint_name(request))
        if fault is None:
            return await self._forward(request, body)
        self.fault_count += 1
        if fault.status is not None:
            return web.Response(status=fault.status, body=fault.body, content_type=fault.content_type)
        answer = await self._forward(request, body) if fault.forwards else None
        if fault.truncates:
            assert answer is not None
            assert isinstance(answer.body, bytes)
            answer.body = answer.body[: len(answer.body) // 2]
            return answer
        if fault.hangs:
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _next_fault(self, place: str) -> Fault | None:
        self.request_counts[place] += 1
        seen = self.request_counts.total() if self._endpoint == ANY_ENDPOINT else self.request_counts[place]
        if self._endpoint not in (place, ANY_ENDPOINT) or seen <= self._after or self._remaining <= 0:
            return None
        self._remaining -= 1
        return self._fault

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with self._client.request(
            request.method,
            self._target_url + str(request.rel_url),
            headers=headers,
            data=body or None,
            skip_auto_headers=["Content-Type"],
        ) as answer:
            kind = answer.headers.get("content-type")
            kept = {} if kind is None else {"content-type": kind}
            response = web.Response(status=answer.status, body=await answer.read(), headers=kept)
            if answer.headers.get("connection") == "close":
                response.force_close()
            return response


def _endpoint_name(request: web.Request) -> str:
    path = ID_PATTERN.sub("*", request.path.removeprefix("/api/v1/"))
    about = request.headers.get(REQUEST_TYPE) if path == "retrieve_future" else None
    return f"{request.method} {path}" + (f" {about}" if about else "")
