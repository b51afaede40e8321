"""Limits on request sizes, calls in flight and time, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import pytest

from instar.config import GatewayConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.auth import create_key
from instar.gateway.base import OpenedSession
from instar.gateway.serve import bind, serve
from instar.types import CallStatus
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import (
    DIALECTS,
    PATHS,
    build_request,
    count_in_flight,
    list_all_calls,
    post,
    wait_for_in_flight,
)


async def assert_nothing_recorded(gateway: RunningGateway) -> None:
    """Check that no session was stored and that the gateway still serves requests."""
    await wait_for_in_flight(gateway, 0)
    assert await gateway.store.sessions("run") == []
    response = await post(gateway, build_request("chat", "hi"))
    assert response.status_code == 200, "the gateway no longer serves requests"


async def connect(gateway: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def build_head(path: str, length: int, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: gateway",
        f"Authorization: Bearer {ADMIN_KEY}",
        f"Content-Length: {length}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def read_status(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(10):
        return int((await reader.readline()).split()[1])


# --- size limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_body_larger_than_the_limit_is_rejected(start_gateway: StartGateway, dialect: str) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_body=10_000))
    response = await post(gateway, build_request(dialect, "x" * 20_000), dialect)
    assert response.status_code == 413
    assert "10000" in response.json()["error"]["message"]
    reader, writer = await connect(gateway)
    writer.write(build_head(PATHS[dialect], 10**12))
    piece = b"x" * 65536
    with suppress(ConnectionError):
        for _ in range(100):
            writer.write(piece)
            await writer.drain()
    assert await read_status(reader) == 413
    writer.close()
    await assert_nothing_recorded(gateway)


async def test_chunked_body_larger_than_the_limit_is_rejected(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_body=10_000))

    async def generate_body() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    response = await gateway.http.post(PATHS["chat"], content=generate_body(), headers=headers)
    assert response.status_code == 413
    await assert_nothing_recorded(gateway)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_too_many_messages_or_tools_are_rejected(start_gateway: StartGateway, dialect: str) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_messages=5, max_tools=2))
    response = await post(gateway, build_request(dialect, *["hi"] * 7), dialect)
    assert response.status_code == 400
    if dialect != "messages":
        assert response.json()["error"]["param"] == ("input" if dialect == "responses" else "messages")
    assert "5" in response.json()["error"]["message"]
    schema = {"type": "object", "properties": {}}
    tool_by_dialect: dict[str, Any] = {
        "chat": {"type": "function", "function": {"name": "f", "parameters": schema}},
        "responses": {"type": "function", "name": "f", "parameters": schema},
        "messages": {"name": "f", "input_schema": schema},
    }
    response = await post(
        gateway, build_request(dialect, "hi", tools=[tool_by_dialect[dialect]] * 3), dialect
    )
    assert response.status_code == 400
    assert "tools" in response.json()["error"]["message"]
    await assert_nothing_recorded(gateway)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATHS["chat"], build_request("chat", "hi")),
        (PATHS["responses"], build_request("responses", "hi")),
        ("/sessions", {}),
        ("/sessions/{session}/complete", {}),
        ("/sessions/{session}/fail", {"reason": "test"}),
    ],
)
async def test_metadata_larger_than_the_limit_is_rejected(
    gateway: RunningGateway, path: str, fields: dict[str, Any]
) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    session_id = (await gateway.http.post("/sessions", json={}, headers=headers)).json()["session_id"]
    path = path.replace("{session}", session_id)
    body = {**fields, "metadata": {str(number): "v" for number in range(10_000)}}
    response = await gateway.http.post(path, json=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "metadata"
    assert "the limit is 65536 (gateway.max_metadata)" in response.json()["error"]["message"]
    body["metadata"] = {str(number): "v" for number in range(5000)}
    response = await gateway.http.post(path, json=body, headers=headers)
    assert response.status_code in (200, 201), response.text


MANY_VALUES = {str(number): number for number in range(200_000)}
LARGE_FORMAT = {"type": "json_schema", "schema": MANY_VALUES}
LARGE_TOOLS = [{"function": {"name": "f", "parameters": MANY_VALUES}}]
LARGE_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    (PATHS["chat"], build_request("chat", "hi", logit_bias=MANY_VALUES)),
    (PATHS["chat"], build_request("chat", "hi", response_format=LARGE_FORMAT)),
    (PATHS["chat"], build_request("chat", "hi", tools=LARGE_TOOLS)),
    (PATHS["responses"], build_request("responses", "hi", text={"format": LARGE_FORMAT})),
    ("/sessions", {"sampling": MANY_VALUES}),
    ("/sessions/{session}/complete", {"scores": [MANY_VALUES]}),
    ("/sessions/{session}/fail", {"reason": "word " * 600_000}),
    ("/sessions/{session}/calls", {"calls": [{"tools": LARGE_TOOLS}]}),
    ("/feedback", {"session_id": "x" * 3_000_000}),
]
"""Requests that would block the event loop. Each has more than 2 MiB outside of its messages."""


@pytest.mark.parametrize(("path", "body"), LARGE_SETTINGS)
async def test_settings_larger_than_the_limit_are_rejected(
    start_gateway: StartGateway, path: str, body: dict[str, Any]
) -> None:
    gateway = await start_gateway(config=GatewayConfig(trust_submitted_calls=True))
    key = await create_key(gateway.store, "agent", "agent")
    session = OpenedSession(**(await gateway.post_json("/sessions", {}, key)).json())
    response = await gateway.post_json(path.replace("{session}", session.session_id), body, key)
    assert response.status_code == 400, response.text[:200]
    assert "bytes outside of messages and token ids; the limit is 2097152" in response.text[:200]


async def test_submission_with_too_many_messages_is_rejected(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_messages=2000))
    session = await gateway.open_session()
    message = {"role": "user", "content": "x" * 30}
    body = {"calls": [{"messages": [message] * 1001}] * 2}
    response = await gateway.post_json(f"/sessions/{session.session_id}/calls", body)
    assert response.status_code == 400
    assert "2002 messages; the limit is 2000 (gateway.max_messages)" in response.text


async def test_headers_larger_than_the_limit_are_rejected(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_header=2000))
    assert (await post(gateway, build_request("chat", "hi"), x_long="x" * 3000)).status_code == 431
    await assert_nothing_recorded(gateway)


@pytest.mark.parametrize("piece", [b"X-Long: " + b"x" * 60_000 + b"\r\n", b"x" * 60_000])
async def test_endless_headers_are_rejected(gateway: RunningGateway, piece: bytes) -> None:
    """The limit applies to many headers and to a single endless header."""
    reader, writer = await connect(gateway)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nX-Long: x")
    if piece.startswith(b"X"):
        writer.write(b"\r\n")
    sent_bytes = 0
    with suppress(ConnectionError):
        while sent_bytes < 64 * 1024 * 1024:
            writer.write(piece)
            await writer.drain()
            sent_bytes += len(piece)
    assert sent_bytes < 32 * 1024 * 1024
    with suppress(ConnectionError):
        assert await read_status(reader) == 431
    writer.close()
    await assert_nothing_recorded(gateway)


# --- calls in flight ----------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_requests_beyond_max_in_flight_are_rejected(start_gateway: StartGateway, dialect: str) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_in_flight=3), delay=0.01)
    responses = await asyncio.gather(
        *(post(gateway, build_request(dialect, f"hi {i}"), dialect) for i in range(10))
    )
    statuses = sorted(response.status_code for response in responses)
    assert statuses == [200] * 3 + [429] * 7
    rejected = next(response for response in responses if response.status_code == 429)
    assert int(rejected.headers["retry-after"]) >= 1
    assert rejected.json()["error"]["message"]
    await wait_for_in_flight(gateway, 0)
    assert len(await list_all_calls(gateway)) == 3
    assert (await post(gateway, build_request(dialect, "hi"), dialect)).status_code == 200


async def test_incomplete_bodies_from_one_key_do_not_block_other_keys(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_in_flight=2))
    key = await create_key(gateway.store, "agent", "ann")
    incomplete = build_head(PATHS["chat"], 1000, "Expect: 100-continue").replace(
        ADMIN_KEY.encode(), key.encode()
    )
    connections = [await connect(gateway) for _ in range(3)]
    statuses: list[int] = []
    for reader, writer in connections:
        writer.write(incomplete)
        statuses.append(await read_status(reader))  # 100 is sent when the gateway waits for the body.
    assert statuses == [100, 100, 429]
    assert (await post(gateway, build_request("chat", "hi"))).status_code == 200
    assert await count_in_flight(gateway) == 0
    for _, writer in connections:
        writer.close()


async def test_request_beyond_max_in_flight_is_rejected_before_its_body(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_in_flight=1), delay=60)
    first = asyncio.create_task(post(gateway, build_request("chat", "hi")))
    await wait_for_in_flight(gateway, 1)
    reader, writer = await connect(gateway)
    writer.write(build_head(PATHS["chat"], 1000))
    assert await read_status(reader) == 429
    writer.close()
    first.cancel()


async def test_stats_require_the_admin_key(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    response = await gateway.http.get("/stats", headers={"Authorization": f"Bearer {session.api_key}"})
    assert response.status_code == 403
    assert await count_in_flight(gateway) == 0


# --- timeouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("partial_head", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: gat"])
async def test_incomplete_headers_time_out(partial_head: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=1, head_timeout=0.3))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    # Send a complete request first, to check that the timeout applies per request, not per connection.
    if partial_head:
        writer.write(build_head("/", 0))
        assert await read_status(reader) == 200
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        writer.write(partial_head)
    assert await read_status(reader) == 408
    await reader.read()
    assert reader.at_eof()
    writer.close()
    stop.set()
    await server


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_incomplete_body_times_out(start_gateway: StartGateway, dialect: str) -> None:
    gateway = await start_gateway(config=GatewayConfig(read_timeout=0.2))
    reader, writer = await connect(gateway)
    body = json.dumps(build_request(dialect, "hi")).encode()
    writer.write(build_head(PATHS[dialect], len(body)) + body[:10])
    assert await read_status(reader) == 408
    writer.close()
    await assert_nothing_recorded(gateway)


async def test_body_that_arrives_byte_by_byte_times_out(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(read_timeout=0.5))
    reader, writer = await connect(gateway)
    body = json.dumps(build_request("chat", "hi")).encode()
    writer.write(build_head(PATHS["chat"], len(body)))
    status_task = asyncio.create_task(read_status(reader))
    for i in range(len(body)):
        if status_task.done():
            break
        writer.write(body[i : i + 1])
        await asyncio.sleep(0.05)
    assert await status_task == 408
    writer.close()
    await assert_nothing_recorded(gateway)


# --- disconnects --------------------------------------------------------------------------------


@pytest.mark.parametrize("sent_bytes", [0, 10])
async def test_disconnect_during_the_body_leaves_no_record(gateway: RunningGateway, sent_bytes: int) -> None:
    body = json.dumps(build_request("chat", "hi")).encode()
    for _ in range(5):
        _, writer = await connect(gateway)
        writer.write(build_head(PATHS["chat"], len(body)) + body[:sent_bytes])
        await writer.drain()
        writer.close()
    await assert_nothing_recorded(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_after_the_request_leaves_no_call_in_flight(
    start_gateway: StartGateway, stream: bool
) -> None:
    gateway = await start_gateway(delay=0.02)
    body = json.dumps(build_request("chat", "hi", stream=stream)).encode()
    for _ in range(5):
        _, writer = await connect(gateway)
        writer.write(build_head(PATHS["chat"], len(body)) + body)
        await writer.drain()
        writer.close()
    await wait_for_in_flight(gateway, 0)
    for call in await list_all_calls(gateway):
        assert (call.status, call.trainable) == (CallStatus.ABORTED, False)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_client_that_does_not_read_is_disconnected(
    start_gateway: StartGateway, model: ModelConfig, dialect: str
) -> None:
    """The gateway aborts the call at the request timeout, so that it is no longer in flight."""
    long_context = model.model_copy(update={"max_context": 400_000})
    engine = ScriptedEngine(long_context, ScriptedEngineConfig(replies=["word " * 60_000]))
    gateway = await start_gateway(engine=engine, config=GatewayConfig(request_timeout=3, read_timeout=0.5))
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        long_request = build_request(dialect, "hi", stream=True) | build_max_tokens_field(dialect, 350_000)
        body = json.dumps(long_request).encode()
        await loop.sock_sendall(client, build_head(PATHS[dialect], len(body)) + body)
        await wait_for_in_flight(gateway, 1)
        await wait_for_in_flight(gateway, 0, timeout_seconds=15)
        (call,) = await list_all_calls(gateway)
        assert (call.status, call.trainable) == (CallStatus.ABORTED, False)
        short_request = build_request(dialect, "hi") | build_max_tokens_field(dialect, 20)
        assert (await post(gateway, short_request, dialect)).status_code == 200


def build_max_tokens_field(dialect: str, count: int) -> dict[str, Any]:
    return {"max_output_tokens" if dialect == "responses" else "max_tokens": count}
