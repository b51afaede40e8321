"""Runs an ASGI app on uvicorn, on a socket that the caller has bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from instar.gateway.http_protocol import LimitedHttpProtocol


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one (``getsockname`` tells it)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(1024)
    return listener


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # Signals belong to the role that runs the server; it sets ``stop``.
        yield


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    stop: asyncio.Event | None = None,
    drain: asyncio.Event | None = None,
    grace: float = 10.0,
    max_head: int = 1 << 20,
    head_timeout: float = 60.0,
) -> None:
    """Serve until ``stop`` is set, then give requests in flight ``grace`` seconds; or until ``drain`` is set
    and every request in flight has ended. Connections that come after either wait at the socket, if anyone
    else holds it. One is closed when the head of a request has more than ``max_head`` bytes or does not come
    within ``head_timeout``."""
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol.with_limits(max_head, head_timeout),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(grace)),
    )
    server = _Server(config)

    async def watch(stop: asyncio.Event) -> None:
        await stop.wait()
        late = server.should_exit  # it drains, without a deadline of its own
        server.should_exit = True
        if late:
            await asyncio.sleep(grace)
            server.force_exit = True

    async def watch_drain(drain: asyncio.Event) -> None:
        await drain.wait()
        if not server.should_exit:
            config.timeout_graceful_shutdown = None
            server.should_exit = True

    watchers = [asyncio.create_task(watch(stop))] if stop else []
    if drain:
        watchers.append(asyncio.create_task(watch_drain(drain)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for watcher in watchers:
            watcher.cancel()
