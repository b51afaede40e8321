"""A busy server accepts new connections without delay."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from instar.gateway.serve import bind, serve

CONNECTIONS = 64


async def count_iterations(listener: socket.socket) -> int:
    """Serve the waiting connections and return how many loop iterations passed from the first to the last."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    iteration = 0
    handled_in: list[int] = []

    def count_iteration() -> None:
        nonlocal iteration
        iteration += 1
        if not stop.is_set():
            loop.call_soon(count_iteration)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            handled_in.append(iteration)
            if len(handled_in) == CONNECTIONS:
                stop.set()
            await PlainTextResponse("done")(scope, receive, send)

    count_iteration()
    await serve(app, listener, stop=stop, grace=1)
    return handled_in[-1] - handled_in[0]


def test_server_accepts_several_waiting_connections_per_loop_iteration() -> None:
    # A loop iteration of a busy gateway takes tens of milliseconds. uvloop accepts one connection in each.
    listener = bind("127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        address = listener.getsockname()
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(CONNECTIONS)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert uvloop.run(count_iterations(listener)) < CONNECTIONS // 4
        assert {client.recv(15) for client in clients} == {b"HTTP/1.1 200 OK"}
