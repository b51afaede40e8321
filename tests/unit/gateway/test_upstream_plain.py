"""The client for providers without TLS, against servers that send arbitrary bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from instar.http.plain import PlainClient, PlainResponse

ConnectionHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class CountingServer:
    """Counts its connections."""

    def __init__(self, handle: ConnectionHandler) -> None:
        self.connections = 0
        self._handle = handle

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client disconnected.
        finally:
            writer.close()


@asynccontextmanager
async def run_server(
    handle: ConnectionHandler, idle_seconds: float = 5.0
) -> AsyncGenerator[tuple[PlainClient, CountingServer]]:
    """Run a server. Yield a client for it, and the server."""
    server = CountingServer(handle)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = PlainClient("127.0.0.1", port, idle_timeout=idle_seconds, connect_timeout=5)
    try:
        yield client, server
    finally:
        client.close()
        listener.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


def make_handler(raw_response: bytes, *, disconnect: bool = False) -> ConnectionHandler:
    """Return a handler that sends the response to every request or, with ``disconnect``, to the first."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(raw_response)
            await writer.drain()
            if disconnect:
                return

    return handle


async def post(client: PlainClient, body: bytes = b"{}") -> PlainResponse:
    return await client.post("/v1/x?y=1", {"a": "b"}, body)


async def test_plain_client_reuses_connections() -> None:
    async with run_server(make_handler(OK_RESPONSE)) as (client, server):
        for _ in range(3):
            response = await post(client)
            assert (response.status, await response.read()) == (200, b"hi")
        assert server.connections == 1


async def test_plain_client_opens_a_connection_per_concurrent_request() -> None:
    async with run_server(make_handler(OK_RESPONSE)) as (client, server):
        responses = await asyncio.gather(*[post(client) for _ in range(5)])
        assert [await response.read() for response in responses] == [b"hi"] * 5
        assert server.connections == 5


async def test_plain_client_drops_idle_connections() -> None:
    async with run_server(make_handler(OK_RESPONSE), idle_seconds=0.0) as (client, server):
        for _ in range(2):
            await (await post(client)).read()
        assert server.connections == 2


async def test_plain_client_sends_the_request() -> None:
    requests: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        writer.write(OK_RESPONSE)

    async with run_server(handle) as (client, _):
        await (await post(client, b"body")).read()
    lines = requests[0].split(b"\r\n")
    assert lines[0] == b"POST /v1/x?y=1 HTTP/1.1"
    assert lines[1].startswith(b"host: 127.0.0.1:")
    assert lines[2:] == [b"content-length: 4", b"a: b", b"", b"body"]


async def test_plain_client_rejects_line_breaks_in_headers() -> None:
    async with run_server(make_handler(OK_RESPONSE)) as (client, _):
        with pytest.raises(ValueError, match="line break"):
            await client.post("/", {"a": "b\r\nc: d"}, b"")


@pytest.mark.parametrize(
    ("raw_response", "disconnect", "is_reused"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n", False, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK_RESPONSE, False, True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", False, False),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi", True, False),
        (b"HTTP/1.0 200 OK\r\n\r\nhi", True, False),
    ],
)
async def test_plain_client_reads_every_body_framing(
    raw_response: bytes, disconnect: bool, is_reused: bool
) -> None:
    async with run_server(make_handler(raw_response, disconnect=disconnect)) as (client, server):
        for _ in range(2):
            response = await post(client)
            assert (response.status, await response.read()) == (200, b"hi")
        assert server.connections == (1 if is_reused else 2)


@pytest.mark.parametrize(
    "raw_response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
    ],
)
async def test_plain_client_raises_for_truncated_responses(raw_response: bytes) -> None:
    async with run_server(make_handler(raw_response, disconnect=True)) as (client, _):
        response = await post(client)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_plain_client_raises_when_the_server_disconnects() -> None:
    async with run_server(make_handler(b"", disconnect=True)) as (client, _):
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await post(client)


async def test_plain_client_raises_for_invalid_http() -> None:
    async with run_server(make_handler(b"220 mail.example ESMTP\r\n")) as (client, _):
        with pytest.raises(aiohttp.ClientPayloadError, match="not valid HTTP"):
            await post(client)


async def test_plain_client_applies_back_pressure() -> None:
    size, sent = 64 << 20, 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(1 << 16))
            sent += 1 << 16
            await writer.drain()

    async with run_server(handle) as (client, _):
        response = await post(client)
        await asyncio.sleep(0.3)
        assert sent < size // 2
        assert len(await response.read()) == size


async def test_plain_client_closes_the_connection_after_an_early_response() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(0.2)

    async with run_server(handle) as (client, server):
        for _ in range(2):
            response = await post(client, bytes(64 << 20))
            assert (response.status, await response.read()) == (413, b"")
        assert server.connections == 2


@pytest.mark.parametrize("has_response", [False, True])
async def test_plain_client_disconnects_if_a_request_or_response_is_not_finished(has_response: bool) -> None:
    disconnected = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if has_response:
            writer.write(OK_RESPONSE[:-1])
        assert await reader.read() == b""
        disconnected.set()

    async with run_server(handle) as (client, _):
        request_task = asyncio.create_task(post(client))
        await asyncio.sleep(0.1)
        if has_response:
            (await request_task).close()
        else:
            request_task.cancel()
        await asyncio.wait_for(disconnected.wait(), 5)
