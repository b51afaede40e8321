"""Connections to a gateway at capacity: calls are rejected before they are parsed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from instar.config import GatewayConfig
from tests.unit.gateway.conftest import RunningGateway, StartGateway
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


async def test_call_that_follows_a_reply_on_its_connection_is_rejected_if_full(
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


async def test_other_routes_of_a_full_gateway_are_served(full_gateway: RunningGateway) -> None:
    reader, writer = await connect(full_gateway)
    writer.write(encode_request("/sessions", {}))
    assert (await read_response(reader))[0] in (200, 201)
    head = build_head("/v1/unknown", 2)
    writer.write(head + b"{}")
    assert (await read_response(reader))[0] == 404
    writer.close()
