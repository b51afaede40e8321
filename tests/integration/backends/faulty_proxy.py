"""An HTTP proxy that forwards requests to a service and injects a fault into some of them."""

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
ANY_ENDPOINT = "any endpoint"
REQUEST_TYPE_HEADER = "X-Tinker-Request-Type"
"""The header in which a Tinker client names the type of operation whose result it requests."""


@dataclass(frozen=True)
class Fault:
    name: str
    request_count: float = 1
    """The number of consecutive requests that have this fault."""
    status: int | None = None
    """The status of the response if the proxy responds instead of the service, with this ``body``."""
    body: bytes = b""
    content_type: str = "application/json"
    forwards: bool = False
    """True if the request reaches the service."""
    truncates: bool = False
    """True if the client receives only the first half of the response's body."""
    hangs: bool = False
    """True if the connection stays open without a response. If there is no response and this is False, the
    proxy closes the connection."""


FAULTS = [
    Fault(
        "503",
        request_count=2,
        status=503,
        body=b'{"error": "unavailable", "message": "m", "retryable": true}',
    ),
    Fault(
        "429",
        request_count=2,
        status=429,
        body=b'{"error": "rate_limited", "message": "m", "retryable": true}',
    ),
    Fault("502", request_count=2, status=502, body=b"<html>bad gateway", content_type="text/html"),
    Fault("closed before"),
    Fault("closed after", forwards=True),
    Fault("truncated", forwards=True, truncates=True),
    Fault("HTML", status=200, body=b"<html>please log in", content_type="text/html"),
    Fault("unknown fields", status=200, body=b'{"unknown": "field"}'),
    Fault("no response", hangs=True),
    Fault("late", forwards=True, hangs=True),
]
TRANSIENT_FAULTS = ("503", "429", "502", "closed before", "closed after")
"""The faults that a client must survive without an error."""
PERMANENT_FAULTS = [
    replace(fault, request_count=float("inf"))
    for fault in FAULTS
    if fault.name in ("503", "closed before", "no response")
]


class FaultyProxy:
    """Injects ``fault`` into requests to ``endpoint`` (or `ANY_ENDPOINT`) after the first ``after`` requests.

    ``request_counts`` has the number of requests to each endpoint.
    """

    def __init__(self, url: str, endpoint: str = "", fault: Fault | None = None, after: int = 0) -> None:
        self._target_url = url
        self._endpoint = endpoint
        self._fault = fault
        self._after = after
        self._remaining_faults = fault.request_count if fault else 0.0
        self.request_counts: Counter[str] = Counter()
        self.fault_count = 0
        self.url = ""

    def disable_fault(self) -> None:
        self._remaining_faults = 0

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
        fault = self._count_request_and_get_fault(_get_endpoint_name(request))
        if fault is None:
            return await self._forward(request, body)
        self.fault_count += 1
        if fault.status is not None:
            return web.Response(status=fault.status, body=fault.body, content_type=fault.content_type)
        response = await self._forward(request, body) if fault.forwards else None
        if fault.truncates:
            assert response is not None
            assert isinstance(response.body, bytes)
            response.body = response.body[: len(response.body) // 2]
            return response
        if fault.hangs:
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _count_request_and_get_fault(self, endpoint: str) -> Fault | None:
        """Count the request, and return the fault to inject into it, if any."""
        self.request_counts[endpoint] += 1
        counts = self.request_counts
        count = counts.total() if self._endpoint == ANY_ENDPOINT else counts[endpoint]
        if (
            self._endpoint not in (endpoint, ANY_ENDPOINT)
            or count <= self._after
            or self._remaining_faults <= 0
        ):
            return None
        self._remaining_faults -= 1
        return self._fault

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with self._client.request(
            request.method,
            self._target_url + str(request.rel_url),
            headers=headers,
            data=body or None,
            skip_auto_headers=["Content-Type"],
        ) as upstream:
            content_type = upstream.headers.get("content-type")
            headers = {} if content_type is None else {"content-type": content_type}
            response = web.Response(status=upstream.status, body=await upstream.read(), headers=headers)
            if upstream.headers.get("connection") == "close":
                response.force_close()
            return response


def _get_endpoint_name(request: web.Request) -> str:
    path = ID_PATTERN.sub("*", request.path.removeprefix("/api/v1/"))
    request_type = request.headers.get(REQUEST_TYPE_HEADER) if path == "retrieve_future" else None
    return f"{request.method} {path}" + (f" {request_type}" if request_type else "")
