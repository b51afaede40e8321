from __future__ import annotations

import asyncio
import time

import pytest
from openai import APIConnectionError, APIError, AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from instar.errors import EngineUnavailable, InstarError
from instar.gateway.base import OpenSession
from instar.gateway.serve import bind, serve
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.slots import is_transient
from instar.types import Channel, SessionStatus
from tests.unit.rollout.harness import RolloutHarness


async def test_gateway_client_opens_and_ends_sessions(harness: RolloutHarness) -> None:
    session = await harness.gateway.open_session(
        OpenSession(
            channel=Channel.TRAIN,
            task_id="t",
            slot=3,
            attempt=1,
            seed=7,
            sampling={"temperature": 0.5},
            metadata={"a": 1},
        )
    )
    stored = await harness.store.session(session.session_id)
    assert stored is not None
    assert (stored.slot, stored.attempt, stored.seed, stored.metadata["a"]) == (3, 1, 7, 1)
    assert (await harness.gateway.fail_session(session.session_id, "test failure", -1.0)).changed
    completed = await harness.gateway.complete_session(session.session_id)
    assert (completed.changed, completed.status) == (False, SessionStatus.FAILED)


async def test_gateway_client_raises_immediately_on_401(harness: RolloutHarness) -> None:
    unauthorized_client = GatewayClient(harness.gateway.url, "sk-wrong", max_wait=30)
    start_time = time.monotonic()
    with pytest.raises(InstarError, match="rejected /sessions with status 401"):
        await unauthorized_client.open_session(OpenSession(channel=Channel.TRAIN))
    assert time.monotonic() - start_time < 5
    await unauthorized_client.close()


async def test_gateway_client_waits_for_an_unavailable_gateway() -> None:
    """The port refuses connections before the server starts, and then the server is busy."""
    responses = [Response(status_code=503), Response(status_code=429)]

    async def open_session(request: Request) -> Response:
        return (
            responses.pop(0)
            if responses
            else JSONResponse({"session_id": "s", "base_url": "u", "api_key": "k"})
        )

    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    client = GatewayClient(f"http://127.0.0.1:{port}", "k", max_wait=20)
    open_task = asyncio.create_task(client.open_session(OpenSession(channel=Channel.TRAIN)))
    await asyncio.sleep(0.3)
    assert not open_task.done()
    stop = asyncio.Event()
    app = Starlette(routes=[Route("/sessions", open_session, methods=["POST"])])
    server = asyncio.create_task(serve(app, bind("127.0.0.1", port), stop=stop, grace=1))
    assert (await asyncio.wait_for(open_task, 20)).session_id == "s"
    assert responses == []
    await client.close()
    stop.set()
    await server


async def test_gateway_client_gives_up_after_max_wait() -> None:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    client = GatewayClient(url, "k", max_wait=0.5)
    with pytest.raises(EngineUnavailable, match="did not respond"):
        await client.open_session(OpenSession(channel=Channel.TRAIN))
    await client.close()


def test_is_transient_recognizes_connection_errors_and_statuses() -> None:
    class SdkError(Exception):
        def __init__(self, status_code: int) -> None:
            self.status_code = status_code

    for error in (ConnectionResetError(), SdkError(429), SdkError(503), EngineUnavailable("x")):
        assert is_transient(error)
    for error in (ValueError(), SdkError(400), SdkError(500), TimeoutError(), OSError("disk")):
        assert not is_transient(error)
    wrapped = RuntimeError("sdk")
    wrapped.__cause__ = ConnectionRefusedError()
    assert is_transient(wrapped)


@pytest.mark.parametrize(
    ("stream_end", "error_class"),
    [
        (b"", APIConnectionError),
        (b'data: {"error": {"message": "The store failed", "code": "store_error"}}\n\n', APIError),
    ],
    ids=["connection lost", "error sent"],
)
async def test_is_transient_with_interrupted_openai_stream_returns_true(
    stream_end: bytes, error_class: type[APIError]
) -> None:
    async def send_partial_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head + stream_end)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(send_partial_stream, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncOpenAI(base_url=url, api_key="k", timeout=30) as client:
        stream = await client.completions.create(model="m", prompt="p", stream=True)
        with pytest.raises(error_class) as interrupted:
            async for _ in stream:
                pass
    assert is_transient(interrupted.value)
