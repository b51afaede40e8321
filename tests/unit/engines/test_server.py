"""Tests for the engine server and its client: authorization, invalid input, errors and disconnects."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.base import EngineInfo, EngineStatus, Prompt, WeightTransfer
from instar.engines.remote import RemoteEngine
from instar.engines.scripted import ScriptedEngine
from instar.engines.server import MAX_BODY_BYTES
from instar.engines.wire import join_chunks
from instar.errors import ConstraintError, EngineError, EngineUnavailable, PromptTooLong
from instar.types import Artifact, Policy, PolicyRef, SamplingParams, TokenChunk
from tests.unit.engines.conformance import collect, get_logprobs, wait_until_idle
from tests.unit.engines.test_conformance import create_scripted_engine, serve_engine


@pytest.fixture
async def url(tiny_model: Path) -> AsyncIterator[str]:
    engine = create_scripted_engine(tiny_model)
    async with serve_engine(engine, "secret") as url:
        yield url
    await engine.close()


async def post(url: str, body: Any, token: str = "secret") -> tuple[int, Any]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as client:
        kwargs = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with client.post(url, **kwargs) as response:
            return response.status, await response.json()


async def test_server_requires_the_token_on_all_routes_except_health(url: str) -> None:
    async with aiohttp.ClientSession() as client:
        for path in ("/info", "/status", "/generate", "/load"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                async with client.get(url + path, headers=headers) as response:
                    assert response.status == 401
        async with client.get(url + "/healthz") as response:
            assert response.status == 200
    with pytest.raises(EngineError, match="bearer token"):
        await RemoteEngine.connect(url, "wrong", timeout=5)


def encode_request(ids: Sequence[int] = (1,), params: bytes = b"{}", *, length: int | None = None) -> bytes:
    header = b'{"params":' + params + b"}"
    size = len(header) if length is None else length
    return size.to_bytes(4, "little") + header + np.asarray(ids, "<i4").tobytes()


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        (b"", "EngineError"),
        (b"\x02", "EngineError"),
        (encode_request(length=2**31), "EngineError"),
        (encode_request() + b"\x00", "EngineError"),
        (b'{"prompt_ids": [1]}', "EngineError"),
        (encode_request([]), "EngineError"),
        (encode_request([99999]), "EngineError"),
        (encode_request([-1]), "EngineError"),
        (encode_request(params=b"not json"), "EngineError"),
        (encode_request(params=b'{"temperature": -1}'), "EngineError"),
        (encode_request(params=b'{"max_tokens": "many"}'), "EngineError"),
        (encode_request([1] * 256), "PromptTooLong"),
        (bytes(MAX_BODY_BYTES + 1), "EngineError"),
    ],
    ids=range(13),
)
async def test_generate_returns_400_for_invalid_bodies(url: str, body: bytes, error_type: str) -> None:
    status, response = await post(url + "/generate", body)
    assert status == 400
    assert response["error"]["type"] == error_type
    assert response["error"]["message"]


async def test_load_returns_400_for_invalid_policies(url: str) -> None:
    assert (await post(url + "/load", {"policy": {}}))[0] == 400
    live = {"policy_id": "p", "version": 1, "artifact": {"kind": "live", "path": ""}}
    assert (await post(url + "/load", {"policy": live}))[0] == 400


async def test_engine_rejects_weights_from_a_replaced_trainer(url: str) -> None:
    replaced, current = RemoteEngine(url, "secret", lease=1), RemoteEngine(url, "secret", lease=2)
    gateway = RemoteEngine(url, "secret")
    first, second = (Policy("p", version, Artifact("base")) for version in (1, 2))
    try:
        await replaced.load(first)
        await current.load(second)
        for call in (
            replaced.load(first),
            replaced.commit(first),
            replaced.stage(WeightTransfer(first, "ipc", {})),
        ):
            with pytest.raises(EngineError, match=r"replaced trainer \(lease 1, the current one is 2\)"):
                await call
        assert (await current.status()).version == 2
        await gateway.load(first)  # other clients have no lease
        await current.load(second)
    finally:
        for engine in (replaced, current, gateway):
            await engine.close()


async def test_server_cancels_the_request_of_a_disconnected_client(tiny_model: Path) -> None:
    engine = create_scripted_engine(tiny_model)
    async with serve_engine(engine, None) as url:
        async with aiohttp.ClientSession() as client:
            body = encode_request([5, 6], b'{"max_tokens":200}')
            response = await client.post(url + "/generate", data=body)
            await response.content.readline()
            assert (await engine.status()).running == 1
            response.close()
        await wait_until_idle(engine)
        assert (await engine.status()).generated_tokens < 150


async def test_server_cancels_a_request_that_the_client_cancels_before_its_first_token(
    tiny_model: Path,
) -> None:
    engine = create_scripted_engine(tiny_model, delay=60)
    async with serve_engine(engine, None) as url:
        remote = await RemoteEngine.connect(url, timeout=10)
        request_task = asyncio.create_task(collect(remote, [5, 6]))
        async with asyncio.timeout(10):
            while (await remote.status()).running == 0:  # noqa: ASYNC110 - the engine is remote
                await asyncio.sleep(0.001)
        request_task.cancel()
        await asyncio.gather(request_task, return_exceptions=True)
        await wait_until_idle(remote)
        assert (await remote.status()).generated_tokens == 0
        await remote.close()


async def test_server_sends_available_tokens_in_one_chunk(tiny_model: Path) -> None:
    fast, slow = create_scripted_engine(tiny_model, delay=0), create_scripted_engine(tiny_model, delay=0.01)
    params = {"max_tokens": 30, "temperature": 0}
    local_chunks = await collect(fast, [5, 6], **params)
    assert len(local_chunks) == 30
    async with serve_engine(fast, None) as url, serve_engine(slow, None) as slow_url:
        for engine_url, chunk_counts in ((url, range(1, 3)), (slow_url, range(8, 31))):
            remote = await RemoteEngine.connect(engine_url, timeout=10)
            chunks = await collect(remote, [5, 6], **params)
            assert join_chunks(chunks) == join_chunks(local_chunks)
            assert len(chunks) in chunk_counts
            await remote.close()


async def test_server_accepts_a_prompt_of_120000_tokens(tiny_model: Path) -> None:
    prompt = np.arange(120_000, dtype=np.int32) % 300
    engine = create_scripted_engine(tiny_model, max_context=130_000)
    async with serve_engine(engine, None) as url:
        remote = await RemoteEngine.connect(url, timeout=10)
        remote_chunks = await collect(remote, prompt, max_tokens=3)
        assert get_logprobs(remote_chunks) == get_logprobs(await collect(engine, prompt, max_tokens=3))
        await remote.close()


class PartialLogprobsEngine(ScriptedEngine):
    """Sends one token with only a logprob, then one with only a behavior logprob."""

    async def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([1], [-1.0], [0])
        yield TokenChunk([2], [math.nan], [0], behavior_logprobs=[-0.5], finish_reason="stop")


async def test_remote_engine_preserves_missing_logprobs(tiny_model: Path) -> None:
    model = ModelConfig(name=str(tiny_model), max_context=256)
    async with serve_engine(PartialLogprobsEngine(model, ScriptedEngineConfig()), None) as url:
        remote = await RemoteEngine.connect(url, timeout=10)
        chunk = join_chunks(await collect(remote, [1]))
        assert chunk.behavior_logprobs is not None
        assert list(map(math.isnan, chunk.logprobs)) == [False, True]
        assert list(map(math.isnan, chunk.behavior_logprobs)) == [True, False]
        await remote.close()


async def test_remote_engine_raises_unavailable_if_no_server_listens() -> None:
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


class FailingEngine(ScriptedEngine):
    """Raises ``error`` from `load`, `status` and, after ``token_count`` tokens, `generate`."""

    def __init__(self, error: EngineError, token_count: int) -> None:
        self._error = error
        self._token_count = token_count

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("failing", "none", 10, 100, ("base",))

    async def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        for _ in range(self._token_count):
            yield TokenChunk([1], [-1.0], [0])
        raise self._error

    async def load(self, policy: Policy) -> None:
        raise self._error

    async def status(self) -> EngineStatus:
        raise self._error


@pytest.mark.parametrize(
    "error", [EngineError("broken"), EngineUnavailable("later"), PromptTooLong("long"), ConstraintError("no")]
)
@pytest.mark.parametrize("token_count", [0, 2])
async def test_remote_engine_raises_the_same_error_class_as_the_server(
    error: EngineError, token_count: int
) -> None:
    async with serve_engine(FailingEngine(error, token_count), None) as url:
        remote = await RemoteEngine.connect(url, timeout=5)
        stream = remote.generate([1], SamplingParams())
        received: list[int] = []
        while len(received) < token_count:
            received += (await anext(stream)).token_ids
        assert received == [1] * token_count
        with pytest.raises(type(error), match=str(error)) as caught:
            await anext(stream)
        assert type(caught.value) is type(error)
        with pytest.raises(type(error), match=str(error)):
            await remote.status()
        await remote.close()


async def test_remote_engine_raises_unavailable_if_the_connection_breaks() -> None:
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
