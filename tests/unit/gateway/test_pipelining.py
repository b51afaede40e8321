"""Requests that a client sends on one connection without waiting for the responses."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

from instar.gateway.http_protocol import LimitedHttpProtocol
from instar.gateway.serve import bind, serve
from instar.types import CallStatus
from tests.unit.gateway.conftest import RunningGateway, StartGateway
from tests.unit.gateway.test_limits import build_head, connect
from tests.unit.gateway.wire import PATHS, build_request, list_all_calls, post, wait_for_in_flight, wait_until


def encode_request(path: str, body: Any, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    return build_head(path, len(content), *headers) + content


async def read_response(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Return the status and the body of the next response."""
    async with asyncio.timeout(30):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        status = int(lines[0].split()[1])
        if "content-length" in headers:
            return status, (await reader.readexactly(int(headers["content-length"]))).decode()
        text = ""
        while size := int(await reader.readline(), 16):
            text += (await reader.readexactly(size)).decode()
            await reader.readline()
        await reader.readline()
        return status, text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
async def test_pipelined_calls_get_their_responses_in_order(
    gateway: RunningGateway, dialect: str, stream: bool
) -> None:
    reader, writer = await connect(gateway)
    texts = [f"text-{i}" for i in range(5)]
    bodies = [build_request(dialect, text, stream=stream and i % 2 == 0) for i, text in enumerate(texts)]
    writer.write(b"".join(encode_request(PATHS[dialect], body) for body in bodies))
    for text in texts:
        status, content = await read_response(reader)
        last_token = text[-1]  # A stream sends each token in its own event.
        assert (status, last_token in content) == (200, True), content
    writer.close()
    assert len(await list_all_calls(gateway)) == 5


async def test_pipelined_requests_to_several_routes_get_their_responses_in_order(
    gateway: RunningGateway,
) -> None:
    reader, writer = await connect(gateway)
    too_long_body = build_request("chat", "x" * 300_000)
    requests = [
        (200, encode_request(PATHS["chat"], build_request("chat", "one"))),
        (200, b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"),
        (400, encode_request(PATHS["chat"], {"model": "m"})),
        (400, encode_request(PATHS["chat"], too_long_body)),
        (404, encode_request("/missing", {})),
        (201, encode_request("/sessions", {})),
        (200, encode_request(PATHS["chat"], build_request("chat", "two"), "Connection: close")),
    ]
    writer.write(b"".join(request for _, request in requests))
    assert [(await read_response(reader))[0] for _ in requests] == [status for status, _ in requests]
    assert await reader.read() == b""
    writer.close()


async def test_malformed_pipelined_request_is_rejected_after_the_earlier_responses(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(delay=0.01)
    reader, writer = await connect(gateway)
    writer.write(encode_request(PATHS["chat"], build_request("chat", "one")) * 2 + b"invalid\r\n\r\n")
    assert [(await read_response(reader))[0] for _ in range(3)] == [200, 200, 400]
    assert await reader.read() == b""
    writer.close()


async def test_disconnect_cancels_pipelined_calls(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(delay=60)
    _, writer = await connect(gateway)
    writer.write(encode_request(PATHS["chat"], build_request("chat", "one")) * 3)
    await wait_for_in_flight(gateway, 1)
    writer.close()
    await wait_for_in_flight(gateway, 0)
    assert all(call.status is CallStatus.ABORTED for call in await list_all_calls(gateway))


async def test_incomplete_pipelined_headers_time_out_after_the_earlier_response() -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            started.set()
            await finish.wait()
            await send({"type": "http.response.body", "body": b"ok"})

    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=1, head_timeout=0.3))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\nGET / HTTP/1.1\r\nHost: ga")
    await started.wait()
    await asyncio.sleep(0.6)  # Longer than the timeout for the second request's headers.
    finish.set()
    assert await read_response(reader) == (200, "ok")
    assert (await read_response(reader))[0] == 408
    assert await reader.read() == b""
    writer.close()
    stop.set()
    await server


async def test_pipelined_request_after_connection_close_is_ignored(gateway: RunningGateway) -> None:
    reader, writer = await connect(gateway)
    writer.write(encode_request(PATHS["chat"], build_request("chat", "one"), "Connection: close") * 2)
    assert (await read_response(reader))[0] == 200
    assert await reader.read() == b""
    writer.close()
    response = await post(
        gateway,
        build_request("chat", "two"),
    )
    assert response.status_code == 200


CALL = encode_request(PATHS["chat"], build_request("chat", "one"))


@pytest.mark.parametrize(
    ("data", "response_count"),
    [
        (b"", 0),
        (CALL, 1),
        (encode_request(PATHS["chat"], build_request("chat", "one", stream=True)) + CALL, 2),
        (encode_request(PATHS["chat"], {"model": "m"}), 1),
        (b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n", 1),
        (CALL[:-5], 0),
        (CALL[:30], 0),
        (CALL * 5, 1),
    ],
    ids=["nothing", "call", "pipelined", "invalid", "control", "half body", "half head", "disconnect"],
)
async def test_closed_connection_does_not_wait_for_the_garbage_collector(
    gateway: RunningGateway, data: bytes, response_count: int
) -> None:
    gc.collect()
    gc.disable()
    try:
        reader, writer = await connect(gateway)
        writer.write(data)
        for _ in range(response_count):
            await read_response(reader)
        await wait_until(find_connections)
        connections = find_connections()
        writer.close()
        await wait_until(lambda: all(connection() is None for connection in connections))
    finally:
        gc.enable()


def find_connections() -> list[weakref.ref[LimitedHttpProtocol]]:
    return [weakref.ref(value) for value in gc.get_objects() if issubclass(type(value), LimitedHttpProtocol)]
