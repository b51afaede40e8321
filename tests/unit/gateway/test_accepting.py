"""A busy server accepts several waiting connections at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from instar.gateway.serve import bind, serve

CONNECTIONS = 64


async def serve_and_count_iterations(listener: socket.socket) -> int:
    """Serve the waiting connections. Return the loop iterations between the first and the last request."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    iteration = 0
    request_iterations: list[int] = []

    def count_iteration() -> None:
        nonlocal iteration
        iteration += 1
        if not stop.is_set():
            loop.call_soon(count_iteration)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request_iterations.append(iteration)
            if len(request_iterations) == CONNECTIONS:
                stop.set()
            await PlainTextResponse("done")(scope, receive, send)

    count_iteration()
    await serve(app, listener, stop=stop, grace=1)
    return request_iterations[-1] - request_iterations[0]


def test_server_accepts_several_waiting_connections_per_loop_iteration() -> None:
    # uvloop accepts only one connection per loop iteration and socket. On a busy gateway, an iteration takes
    # tens of milliseconds, so that new clients would wait for seconds.
    listener = bind("127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        address = listener.getsockname()
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(CONNECTIONS)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert uvloop.run(serve_and_count_iterations(listener)) < CONNECTIONS // 4
        assert {client.recv(15) for client in clients} == {b"HTTP/1.1 200 OK"}
