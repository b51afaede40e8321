"""The wire: authorisation, refusals, errors in mid-stream, clients and engines that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from instar.engines.base import EngineInfo, EngineStatus
from instar.engines.remote import RemoteEngine
from instar.engines.scripted import ScriptedEngine
from instar.errors import EngineError, EngineUnavailable, PromptTooLong
from instar.types import Policy, SamplingParams, TokenChunk
from tests.unit.engines.conformance import collect, settled
from tests.unit.engines.test_conformance import scripted_engine, served


@pytest.fixture
async def url(tiny: Path) -> AsyncIterator[str]:
    engine = scripted_engine(tiny)
    async with served(engine, "secret") as url:
        yield url
    await engine.close()


async def post(url: str, body: Any, token: str = "secret") -> tuple[int, Any]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as client:
        async with client.post(url, json=body) as response:
            return response.status, await response.json()


async def test_every_route_but_health_wants_the_token(url: str) -> None:
    async with aiohttp.ClientSession() as client:
        for path in ("/info", "/status", "/generate", "/load"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                async with client.get(url + path, headers=headers) as response:
                    assert response.status == 401
        async with client.get(url + "/healthz") as response:
            assert response.status == 200
    with pytest.raises(EngineError, match="bearer token"):
        await RemoteEngine.connect(url, "wrong", timeout=5)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "EngineError"),
        ({"prompt_ids": []}, "EngineError"),
        ({"prompt_ids": [99999]}, "EngineError"),
        ({"prompt_ids": [-1]}, "EngineError"),
        ({"prompt_ids": "text"}, "EngineError"),
        ({"prompt_ids": [1], "params": {"temperature": -1}}, "EngineError"),
        ({"prompt_ids": [1], "params": {"max_tokens": "many"}}, "EngineError"),
        ({"prompt_ids": [1], "extra": 1}, "EngineError"),
        ({"prompt_ids": [1] * 256}, "PromptTooLong"),
    ],
)
async def test_bad_input_is_a_400(url: str, body: Any, kind: str) -> None:
    status, answer = await post(url + "/generate", body)
    assert status == 400
    assert answer["error"]["type"] == kind
    assert answer["error"]["message"]


async def test_bad_policies_are_a_400(url: str) -> None:
    assert (await post(url + "/load", {"policy": {}}))[0] == 400
    remote = {"policy_id": "p", "version": 1, "artifact": {"kind": "remote", "path": ""}}
    assert (await post(url + "/load", {"policy": remote}))[0] == 400


async def test_a_client_that_disconnects_cancels(tiny: Path) -> None:
    engine = scripted_engine(tiny)
    async with served(engine, None) as url:
        async with aiohttp.ClientSession() as client:
            body = {"prompt_ids": [5, 6], "params": {"max_tokens": 200}}
            response = await client.post(url + "/generate", json=body)
            await response.content.readline()
            assert (await engine.status()).running == 1
            response.close()
        await settled(engine)
        assert (await engine.status()).generated_tokens < 150


async def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(EngineUnavailable):
        await RemoteEngine.connect("http://127.0.0.1:9", timeout=0.2)
    remote = RemoteEngine("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable):
        await collect(remote, [1])
    with pytest.raises(EngineUnavailable):
        await remote.status()
    with pytest.raises(EngineUnavailable):
        _ = remote.info
    await remote.close()


class BreakingEngine(ScriptedEngine):
    """Fails with a given error, at once or after a token."""

    def __init__(self, error: EngineError, after: int) -> None:
        self._error = error
        self._after = after

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("breaking", "none", 10, 100, ("base",))

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[TokenChunk]:
        for _ in range(self._after):
            yield TokenChunk([1], [-1.0], [0])
        raise self._error

    async def load(self, policy: Policy) -> None:
        raise self._error

    async def status(self) -> EngineStatus:
        raise self._error


@pytest.mark.parametrize("error", [EngineError("broken"), EngineUnavailable("later"), PromptTooLong("long")])
@pytest.mark.parametrize("after", [0, 2])
async def test_errors_keep_their_class_on_the_wire(error: EngineError, after: int) -> None:
    async with served(BreakingEngine(error, after), None) as url:
        remote = await RemoteEngine.connect(url, timeout=5)
        stream = remote.generate([1], SamplingParams())
        assert [(await anext(stream)).token_ids for _ in range(after)] == [[1]] * after
        with pytest.raises(type(error), match=str(error)) as caught:
            await anext(stream)
        assert type(caught.value) is type(error)
        with pytest.raises(type(error), match=str(error)):
            await remote.status()
        await remote.close()


async def test_a_server_that_dies_in_mid_reply_is_unavailable() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        line = b'{"token_ids":[1],"logprobs":[-1.0],"versions":[0]}\n'
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(line), line))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    remote = RemoteEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(EngineUnavailable):
        await collect(remote, [1])
    await remote.close()
    server.close()
    await server.wait_closed()
