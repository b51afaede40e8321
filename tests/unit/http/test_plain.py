"""Tests for connection reuse in `PlainClient`."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress

from instar.http.plain import PlainClient

RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_request_cancelled_after_its_response_does_not_abort_the_next_request() -> None:
    connections, disconnected = 0, asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(RESPONSE)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        disconnected.set()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    client = PlainClient("127.0.0.1", server.sockets[0].getsockname()[1], idle_timeout=30, connect_timeout=10)
    async with server, asyncio.timeout(10):
        first = asyncio.create_task(client.post("/", {}, b""))
        while not client._idle_connections:  # noqa: ASYNC110 - waits for the response, but not for the task
            await asyncio.sleep(0)
        second = asyncio.create_task(client.post("/", {}, b""))
        first.cancel()
        assert await (await second).read() == b"ok"
        assert connections == 1
        assert first.cancelled()
        client.close()
        await disconnected.wait()


async def test_closed_connection_does_not_wait_for_the_garbage_collector() -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(RESPONSE)
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    client = PlainClient("127.0.0.1", server.sockets[0].getsockname()[1], idle_timeout=30, connect_timeout=10)
    gc.disable()
    try:
        async with server, asyncio.timeout(30):
            response = await client.post("/", {}, b"")
            connection = weakref.ref(response._connection)
            assert await response.read() == b"ok"
            del response
            while connection() is not None:  # noqa: ASYNC110 - nothing reports that an object is freed
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
