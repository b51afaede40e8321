"""A gateway with `max_in_flight` calls rejects further calls before it parses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from instar.config import GatewayConfig
from instar.gateway.http_protocol import LimitedHttpProtocol, find_post_path
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.test_limits import build_head, connect
from tests.unit.gateway.test_pipelining import encode_request, read_response
from tests.unit.gateway.wire import DIALECTS, PATHS, build_request, post, wait_for_in_flight


@pytest.fixture
async def full_gateway(start_gateway: StartGateway) -> AsyncGenerator[RunningGateway]:
    """A gateway with `max_in_flight: 1` and one call that does not end."""
    gateway = await start_gateway(config=GatewayConfig(max_in_flight=1), delay=60)
    call = asyncio.create_task(post(gateway, build_request("chat", "hi")))
    await wait_for_in_flight(gateway, 1)
    yield gateway
    call.cancel()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_call_on_a_full_gateway_gets_429_in_its_dialect(
    full_gateway: RunningGateway, dialect: str
) -> None:
    responses = [await post(full_gateway, build_request(dialect, "hi"), dialect) for _ in range(3)]
    assert {response.status_code for response in responses} == {429}
    assert {response.headers["retry-after"] for response in responses} == {"1"}
    assert responses[0].json()["error"]["type"] == "rate_limit_error"
    assert ("type" in responses[0].json()) == (dialect == "messages"), (
        "the error has another dialect's format"
    )


async def test_connection_is_usable_after_a_rejected_call(full_gateway: RunningGateway) -> None:
    reader, writer = await connect(full_gateway)
    request = encode_request(PATHS["chat"], build_request("chat", "hi"))
    for pieces in ([request], [request[:20], request[20:]], [request[:-5], request[-5:]], [request]):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        status, content = await read_response(reader)
        assert (status, json.loads(content)["error"]["code"]) == (429, "too_many_requests")
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await read_response(reader))[0] == 200
    writer.write(request)
    assert (await read_response(reader))[0] == 429
    writer.close()


async def test_pipelined_calls_on_a_full_gateway_are_all_rejected(full_gateway: RunningGateway) -> None:
    reader, writer = await connect(full_gateway)
    writer.write(encode_request(PATHS["chat"], build_request("chat", "hi")) * 5)
    assert [(await read_response(reader))[0] for _ in range(5)] == [429] * 5
    writer.close()


async def test_rejected_call_with_connection_close_closes_the_connection(
    full_gateway: RunningGateway,
) -> None:
    reader, writer = await connect(full_gateway)
    writer.write(encode_request(PATHS["chat"], build_request("chat", "hi"), "Connection: close"))
    assert (await read_response(reader))[0] == 429
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_later_call_on_a_connection_is_rejected_only_while_the_gateway_is_full(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_in_flight=1), delay=0.02)
    reader, writer = await connect(gateway)
    request = encode_request(PATHS["chat"], build_request("chat", "hi"))
    writer.write(request)
    assert (await read_response(reader))[0] == 200
    await wait_for_in_flight(gateway, 0)
    other = asyncio.create_task(post(gateway, build_request("chat", "other")))
    await wait_for_in_flight(gateway, 1)
    writer.write(request)
    assert (await read_response(reader))[0] == 429
    assert (await other).status_code == 200
    await wait_for_in_flight(gateway, 0)
    writer.write(request)
    assert (await read_response(reader))[0] == 200
    writer.close()


async def test_calls_that_arrive_together_are_rejected_before_they_are_parsed(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_in_flight=2), delay=60)
    await gateway.http.get("/sessions", headers={"Authorization": f"Bearer {ADMIN_KEY}"})  # caches the key
    connections = [await connect(gateway) for _ in range(20)]
    request = encode_request(PATHS["chat"], build_request("chat", "hi"))
    for _, writer in connections:  # without an await, so that the gateway receives them together
        writer.write(request)
    heads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in connections]
    async with asyncio.timeout(30):
        for _ in range(18):
            done, _ = await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
            head = heads.pop(heads.index(done.pop())).result()
            assert head.startswith(b"HTTP/1.1 429")
            assert b"\r\ndate:" not in head, "the response came through uvicorn, which adds a date"
    await wait_for_in_flight(gateway, 2)
    for head in heads:
        head.cancel()
    for _, writer in connections:
        writer.close()


async def test_other_routes_of_a_full_gateway_are_served(full_gateway: RunningGateway) -> None:
    reader, writer = await connect(full_gateway)
    writer.write(encode_request("/sessions", {}))
    assert (await read_response(reader))[0] == 201
    writer.write(build_head("/v1/unknown", 2) + b"{}")
    assert (await read_response(reader))[0] == 404
    writer.close()


PLAIN_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\n{}"
)
MALFORMED_CHANGES = {
    "long length": (b"Content-Length: 2", b"Content-Length: " + b"1" * 5000),
    "two lengths": (b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 9"),
    "space before the colon": (b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length : 9"),
    "folded line": (b"Content-Length: 2", b"Content-Length: 2\r\n 0"),
    "bare line feed": (b"Host: x", b"Host: x\nTransfer-Encoding: chunked"),
    "control character": (b"Host: x", b"Host: x\x00"),
    "no colon": (b"Host: x", b"Host"),
    "space in the path": (b"/v1/chat", b"/v1 /chat"),
}
"""Replacements in `PLAIN_REQUEST` that make it malformed."""


def test_find_post_path_returns_the_path_of_a_plain_request() -> None:
    assert find_post_path(PLAIN_REQUEST) == b"/v1/chat/completions"
    assert (
        find_post_path(PLAIN_REQUEST.replace(b" HTTP/1.1", b"?a=b%20c HTTP/1.1")) == b"/v1/chat/completions"
    )


@pytest.mark.parametrize(
    "change",
    [
        *MALFORMED_CHANGES.values(),
        (b"keep-alive", b"close"),
        (b" keep-alive", b"close"),
        (b"keep-alive", b"keep-alive, close"),
        (b"POST", b"PUT"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"/v1/chat", b"/s/a%2Fb/v1/chat"),
        (b"{}", b"{"),
        (b"{}", b"{}POST"),
        (b"Host: x", b"Expect: 100-continue"),
        (b"Host: x", b"Upgrade: h2c"),
    ],
)
def test_find_post_path_leaves_other_requests_to_the_parser(change: tuple[bytes, bytes]) -> None:
    data = PLAIN_REQUEST.replace(*change)
    assert data != PLAIN_REQUEST
    assert find_post_path(data) is None


@pytest.mark.parametrize("change", MALFORMED_CHANGES.values(), ids=MALFORMED_CHANGES)
async def test_malformed_request_on_a_full_gateway_closes_the_connection(
    full_gateway: RunningGateway, change: tuple[bytes, bytes]
) -> None:
    reader, writer = await connect(full_gateway)
    writer.write(PLAIN_REQUEST.replace(*change))
    assert (await read_response(reader))[0] == 400
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


def open_rejecting_connection() -> tuple[LimitedHttpProtocol, Mock, ServerState]:
    config = uvicorn.Config(
        _respond_with_nothing, http=LimitedHttpProtocol.with_limits(1 << 20, 60.0), timeout_keep_alive=75
    )
    config.load()
    protocol_class = LimitedHttpProtocol.with_limits(1 << 20, 60.0, lambda _: b"rejected")
    state = ServerState()
    protocol = protocol_class(config, state, {}, asyncio.get_running_loop())
    transport = Mock(asyncio.Transport)
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    protocol.connection_made(transport)
    return protocol, transport, state


async def test_rejected_connection_stays_open_until_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    protocol, transport, _ = open_rejecting_connection()
    protocol.data_received(PLAIN_REQUEST)
    monkeypatch.setattr(loop, "time", lambda: now + 70)
    protocol.data_received(PLAIN_REQUEST)
    monkeypatch.setattr(loop, "time", lambda: now + 76)
    protocol.timeout_keep_alive_handler()
    transport.close.assert_not_called()
    assert protocol.timeout_keep_alive_task is not None
    assert protocol.timeout_keep_alive_task.when() == pytest.approx(now + 70 + 75, abs=1)
    monkeypatch.setattr(loop, "time", lambda: now + 146)
    protocol.timeout_keep_alive_handler()
    transport.close.assert_called_once()
    protocol.connection_lost(None)


async def test_connection_with_unread_responses_is_not_rejected_early() -> None:
    """Otherwise, a client that does not read could make the write buffer grow with every request."""
    protocol, transport, state = open_rejecting_connection()
    protocol.data_received(PLAIN_REQUEST)
    transport.write.assert_called_once_with(b"rejected")
    protocol.pause_writing()
    protocol.data_received(PLAIN_REQUEST)
    transport.write.assert_called_once()
    protocol.connection_lost(None)
    await asyncio.gather(*state.tasks)


async def _respond_with_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del scope, receive, send
