"""Run an ASGI app with uvicorn on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from instar.gateway.http_protocol import LimitedHttpProtocol, RejectEarly

_ACCEPTS_PER_ITERATION = 16


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 selects a free port."""
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
        # The caller of `serve` handles signals and sets ``stop``.
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
    reject_early: RejectEarly | None = None,
) -> None:
    """Serve until ``stop`` or ``drain`` is set.

    Requests in flight have ``grace`` seconds to finish after ``stop``, and no limit after ``drain`` alone.
    After either event, new connections wait until another process accepts them from the same socket. A
    connection is closed if request headers exceed ``max_head`` bytes or do not arrive within ``head_timeout``
    seconds. ``reject_early`` may reject requests before they are parsed.
    """
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol.with_limits(max_head, head_timeout, reject_early),
        ws="none",
        log_level="error",  # A client must not fill the log with warnings about its malformed requests.
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(grace)),
    )
    server = _Server(config)

    async def wait_for_stop(stop: asyncio.Event) -> None:
        await stop.wait()
        is_draining = server.should_exit
        server.should_exit = True
        if is_draining:  # uvicorn has no deadline for a drain.
            await asyncio.sleep(grace)
            server.force_exit = True

    async def wait_for_drain(drain: asyncio.Event) -> None:
        await drain.wait()
        if not server.should_exit:
            config.timeout_graceful_shutdown = None
            server.should_exit = True

    # uvloop accepts one connection per socket and loop iteration, so listen on copies of the socket.
    listeners = [listener, *(listener.dup() for _ in range(_ACCEPTS_PER_ITERATION - 1))]
    watchers = [asyncio.create_task(wait_for_stop(stop))] if stop else []
    if drain:
        watchers.append(asyncio.create_task(wait_for_drain(drain)))
    try:
        await server.serve(sockets=listeners)
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
