"""Retries get the recorded reply, as do repeated requests whose reply was not delivered. Other repeated
requests are sampled again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from instar.config import GatewayConfig, ModelConfig, UpstreamEngineConfig
from instar.gateway.base import OpenedSession
from instar.gateway.upstream.http import HttpUpstream
from instar.record.base import Renderer
from instar.store.sqlite import SqliteStore
from instar.types import Call, CallStatus, Link
from tests.tiny import make_tiny_tokenizer
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway, run_gateway
from tests.unit.gateway.provider import TEXT, run_provider
from tests.unit.gateway.wire import (
    DIALECTS,
    PATHS,
    build_request,
    get_session_id,
    list_all_calls,
    post,
    run_scripted_gateway,
    wait_for_in_flight,
)

RETRY_HEADERS = {"x_stainless_retry_count": "1"}
IDEMPOTENCY_HEADERS = {"idempotency_key": "one"}


def drop_timestamps(response: httpx.Response) -> Any:
    """Return the response body without its timestamps."""
    assert response.status_code == 200, response.text
    return {
        name: value
        for name, value in response.json().items()
        if name not in ("created", "created_at", "completed_at")
    }


async def list_links(gateway: RunningGateway) -> list[Link]:
    return [call.link for call in await list_all_calls(gateway)]


# --- completed requests -------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("retry_headers", [RETRY_HEADERS, IDEMPOTENCY_HEADERS])
async def test_retry_of_a_recorded_call_is_replayed(
    gateway: RunningGateway, dialect: str, retry_headers: dict[str, str]
) -> None:
    session = await gateway.open_session()
    body = build_request(dialect, "hi")
    first = await post(gateway, body, dialect, key=session.api_key, **IDEMPOTENCY_HEADERS)
    headers = {**IDEMPOTENCY_HEADERS, **retry_headers}
    retry = await post(gateway, body, dialect, key=session.api_key, **headers)
    assert drop_timestamps(retry) == drop_timestamps(first)
    assert len(await gateway.calls(session)) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_retry_of_a_first_call_finds_its_session(gateway: RunningGateway, dialect: str) -> None:
    """The requests have no session id, so only their content identifies the session."""
    first = await post(gateway, build_request(dialect, "hi"), dialect)
    retry = await post(gateway, build_request(dialect, "hi"), dialect, **RETRY_HEADERS)
    assert drop_timestamps(retry) == drop_timestamps(first)
    assert get_session_id(retry) == get_session_id(first)
    assert await list_links(gateway) == [Link.ROOT]
    other = await post(gateway, build_request(dialect, "hi"), dialect)
    assert get_session_id(other) != get_session_id(first)


async def test_retry_of_a_first_call_by_idempotency_key_is_replayed(gateway: RunningGateway) -> None:
    first = await post(gateway, build_request("chat", "hi"), **IDEMPOTENCY_HEADERS)
    assert drop_timestamps(
        await post(gateway, build_request("chat", "hi"), **IDEMPOTENCY_HEADERS)
    ) == drop_timestamps(first)
    assert get_session_id(
        await post(gateway, build_request("chat", "hi"), idempotency_key="two")
    ) != get_session_id(first)
    assert await list_links(gateway) == [Link.ROOT] * 2


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_replay_of_a_stream_request_is_streamed(gateway: RunningGateway, dialect: str) -> None:
    session = await gateway.open_session()
    body = build_request(dialect, "hi", stream=True)
    first = await post(gateway, body, dialect, key=session.api_key, **IDEMPOTENCY_HEADERS)
    retry = await post(gateway, body, dialect, key=session.api_key, **IDEMPOTENCY_HEADERS)
    assert retry.headers["content-type"].startswith("text/event-stream")
    (call,) = await gateway.calls(session)
    assert call.request_id in first.text
    assert call.request_id in retry.text
    assert "You said: hi" in retry.text


async def test_replay_keeps_tool_call_ids(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    function = {"name": "calc", "parameters": {"type": "object", "properties": {}}}
    body = build_request("chat", "24 * 310", tools=[{"type": "function", "function": function}])
    first = await post(gateway, body, key=session.api_key)
    assert first.json()["choices"][0]["message"]["tool_calls"]
    assert drop_timestamps(
        await post(gateway, body, key=session.api_key, **RETRY_HEADERS)
    ) == drop_timestamps(first)


async def test_replay_returns_all_choices(gateway: RunningGateway) -> None:
    session = await gateway.open_session(seed=1)
    body = build_request("chat", "seed", n=3)
    first = await post(gateway, body, key=session.api_key)
    assert drop_timestamps(
        await post(gateway, body, key=session.api_key, **RETRY_HEADERS)
    ) == drop_timestamps(first)
    fewer = await post(gateway, {**body, "n": 2}, key=session.api_key, **RETRY_HEADERS)
    assert len(fewer.json()["choices"]) == 2
    assert len(await gateway.calls(session)) == 5


async def test_replay_of_generate_returns_the_tokens(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    headers = {"Authorization": f"Bearer {session.api_key}", "Idempotency-Key": "one"}
    body = {"prompt_ids": encode_prompt(), "temperature": 0.5}
    first = await gateway.http.post("/v1/generate", json=body, headers=headers)
    retry = await gateway.http.post("/v1/generate", json=body, headers=headers)
    assert first.status_code == 200, first.text
    (first_choice,), (retried_choice,) = first.json()["choices"], retry.json()["choices"]
    for name in ("logprobs", "behavior_logprobs"):  # Stored as 32-bit floats.
        assert retried_choice.pop(name) == pytest.approx(first_choice.pop(name))
    assert retry.json()["id"] == first.json()["id"]
    assert retried_choice == first_choice
    streamed = await gateway.http.post("/v1/generate", json={**body, "stream": True}, headers=headers)
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    tokens = [token for line in lines for token in line["token_ids"]]
    assert tokens == first.json()["choices"][0]["token_ids"]
    assert lines[-1]["finish_reason"] == "stop"
    assert len(await gateway.calls(session)) == 1


def encode_prompt() -> list[int]:
    return make_tiny_tokenizer().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_request_with_a_different_idempotency_key_is_sampled(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    body = build_request("chat", "hi")
    first = await post(gateway, body, key=session.api_key, **IDEMPOTENCY_HEADERS)
    other = await post(gateway, body, key=session.api_key, idempotency_key="two", **RETRY_HEADERS)
    assert other.json()["id"] != first.json()["id"]
    assert await list_links(gateway) == [Link.ROOT, Link.SIBLING]


async def test_idempotency_key_with_a_different_body_is_sampled(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    first = await post(gateway, build_request("chat", "hi"), key=session.api_key, **IDEMPOTENCY_HEADERS)
    other = await post(gateway, build_request("chat", "ho"), key=session.api_key, **IDEMPOTENCY_HEADERS)
    assert other.json()["choices"][0]["message"]["content"] == "You said: ho"
    assert other.json()["id"] != first.json()["id"]


async def test_repeated_request_without_retry_headers_is_a_sibling(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    responses = [await post(gateway, build_request("chat", "hi"), key=session.api_key) for _ in range(3)]
    assert len({response.json()["id"] for response in responses}) == 3
    assert await list_links(gateway) == [Link.ROOT, Link.SIBLING, Link.SIBLING]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_retry_after_a_restart_is_replayed(
    tmp_path: Path, model: ModelConfig, renderer: Renderer, dialect: str
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    body = build_request(dialect, "hi")
    async with run_scripted_gateway(*gateway_args) as gateway:
        session = await gateway.open_session()
        request_options = {"key": session.api_key, "prefix": f"/s/{session.session_id}"}
        first = await post(gateway, body, dialect, **request_options, **IDEMPOTENCY_HEADERS)
    async with run_scripted_gateway(*gateway_args) as gateway:
        assert drop_timestamps(
            await post(gateway, body, dialect, **request_options, **IDEMPOTENCY_HEADERS)
        ) == drop_timestamps(first)
        assert drop_timestamps(
            await post(gateway, body, dialect, **request_options, **RETRY_HEADERS)
        ) == drop_timestamps(first)
        other = await post(gateway, body, dialect, **request_options, idempotency_key="two")
        assert other.json()["id"] != first.json()["id"]
        assert await list_links(gateway) == [Link.ROOT, Link.SIBLING]


# --- requests in flight -------------------------------------------------------------------------


@pytest.mark.parametrize("retry_headers", [RETRY_HEADERS, IDEMPOTENCY_HEADERS])
async def test_retry_waits_for_the_request_in_progress(
    start_gateway: StartGateway, retry_headers: dict[str, str]
) -> None:
    gateway = await start_gateway(delay=0.01)
    body = build_request("chat", "hi there")
    first = asyncio.create_task(
        post(gateway, body, **({} if retry_headers is RETRY_HEADERS else IDEMPOTENCY_HEADERS))
    )
    await wait_for_in_flight(gateway, 1)
    retries = await asyncio.gather(*(post(gateway, body, **retry_headers) for _ in range(3)))
    for response in retries:
        assert drop_timestamps(response) == drop_timestamps(await first)
    assert await list_links(gateway) == [Link.ROOT]


async def test_retry_waits_for_the_request_with_its_idempotency_key(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(delay=0.01)
    session = await gateway.open_session(seed=3)
    body = build_request("chat", "seed")
    tasks: list[asyncio.Task[httpx.Response]] = []
    for i, name in enumerate(("one", "two")):
        tasks.append(asyncio.create_task(post(gateway, body, key=session.api_key, idempotency_key=name)))
        await wait_for_in_flight(gateway, i + 1)
    retries = [
        await post(gateway, body, key=session.api_key, idempotency_key=name) for name in ("one", "two")
    ]
    assert [response.json()["id"] for response in retries] == [(await task).json()["id"] for task in tasks]
    assert len(await gateway.calls(session)) == 2


async def test_concurrent_identical_requests_are_siblings(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(delay=0.005)
    session = await gateway.open_session()
    responses = await asyncio.gather(
        *(post(gateway, build_request("chat", "hi"), key=session.api_key) for _ in range(5))
    )
    assert len({response.json()["id"] for response in responses}) == 5
    assert sorted(await list_links(gateway)) == [Link.ROOT, *[Link.SIBLING] * 4]


# --- disconnected clients -----------------------------------------------------------------------


@asynccontextmanager
async def read_partial_stream(
    gateway: RunningGateway, dialect: str, key: str = ADMIN_KEY, **headers: str
) -> AsyncGenerator[httpx.Response]:
    """Yield a streamed response after part of it has arrived."""
    body = build_request(dialect, "long", stream=True)
    http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
        http.stream(
            "POST", PATHS[dialect], json=body, headers={"Authorization": f"Bearer {key}", **http_headers}
        ) as response,
    ):
        text, pieces = "", response.aiter_text()
        while text.count("data: ") < 12:
            text += await anext(pieces)
        yield response
        await pieces.aclose()


async def get_aborted_call(gateway: RunningGateway, session: OpenedSession) -> Call:
    await wait_for_in_flight(gateway, 0)
    (call,) = await gateway.calls(session)
    assert call.status is CallStatus.ABORTED
    return call


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_aborted_stream_is_recorded_with_its_tokens(start_gateway: StartGateway, dialect: str) -> None:
    gateway = await start_gateway(delay=0.005)
    session = await gateway.open_session()
    async with read_partial_stream(gateway, dialect, session.api_key, idempotency_key="one"):
        pass
    aborted = await get_aborted_call(gateway, session)
    assert not aborted.trainable
    assert aborted.finish_reason == "aborted"
    assert aborted.reason == "the client disconnected"
    assert 0 < len(aborted.sampled_ids) < 200
    assert aborted.reply["content"].startswith("word")
    retry = await post(
        gateway, build_request(dialect, "long"), dialect, key=session.api_key, idempotency_key="one"
    )
    assert retry.status_code == 200, retry.text
    _, sibling = await gateway.calls(session)
    assert (sibling.link, sibling.status, sibling.trainable) == (Link.SIBLING, CallStatus.OK, True)
    assert sibling.request_id != aborted.request_id


async def test_concurrent_retries_of_an_aborted_request_share_one_new_reply(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(delay=0.002)
    session = await gateway.open_session()
    async with read_partial_stream(gateway, "chat", session.api_key):
        retries = [
            asyncio.create_task(
                post(gateway, build_request("chat", "long"), key=session.api_key, **RETRY_HEADERS)
            )
            for _ in range(3)
        ]
        await wait_for_in_flight(gateway, 4)
    ids = {(await task).json()["id"] for task in retries}
    calls = await gateway.calls(session)
    assert len(ids) == 1
    assert [call.status for call in calls] == [CallStatus.ABORTED, CallStatus.OK]


class GatedStore(SqliteStore):
    """Sets ``add_started`` before it adds calls, and waits for ``released``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_started = asyncio.Event()
        self.released = asyncio.Event()

    async def add_calls(self, *args: Any, **options: Any) -> None:
        self.add_started.set()
        await self.released.wait()
        await super().add_calls(*args, **options)


@pytest.mark.parametrize("recorded_before_retry", [False, True])
async def test_undelivered_reply_is_replayed_to_the_next_request(
    start_gateway: StartGateway, recorded_before_retry: bool
) -> None:
    gateway = await start_gateway(store_class=GatedStore)
    store = gateway.store
    assert isinstance(store, GatedStore)
    for request_options in ({"key": (await gateway.open_session()).api_key}, {}):
        body = build_request("chat", "hi")
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            headers = {"Authorization": f"Bearer {request_options.get('key', ADMIN_KEY)}"}
            first = asyncio.create_task(http.post(PATHS["chat"], json=body, headers=headers))
            await store.add_started.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        if recorded_before_retry:
            store.released.set()
            await wait_for_in_flight(gateway, 0)
        previous_count = len(await list_all_calls(gateway))
        retry = asyncio.create_task(post(gateway, body, **request_options))
        if not recorded_before_retry:
            await wait_for_in_flight(gateway, 2)
        store.released.set()
        response = await retry
        assert response.json()["choices"][0]["message"]["content"] == "You said: hi"
        calls = await gateway.store.calls(get_session_id(response))
        assert [call.request_id for call in calls] == [response.json()["id"]]
        assert len(await list_all_calls(gateway)) == previous_count + (0 if recorded_before_retry else 1)
        third = await post(gateway, body, **request_options)
        assert third.json()["id"] != response.json()["id"]
        store.add_started.clear()
        store.released.clear()


# --- providers ----------------------------------------------------------------------------------


@pytest.fixture
async def provider_gateway(tmp_path: Path) -> AsyncGenerator[RunningGateway]:
    """A gateway that forwards calls to a provider."""
    async with run_provider() as provider:
        upstream = HttpUpstream(
            UpstreamEngineConfig(
                base_url=f"{provider.url}/v1", dialect="chat", also=["messages", "responses", "completions"]
            )
        )
        try:
            async with run_gateway(
                tmp_path / "store.db", None, None, GatewayConfig(), upstream=upstream
            ) as gateway:
                yield gateway
        finally:
            await upstream.close()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_retry_of_a_provider_call_is_replayed(
    provider_gateway: RunningGateway, dialect: str, stream: bool
) -> None:
    body = build_request(dialect, "hi", stream=stream) | {"model": "plain"}
    first = await post(provider_gateway, body, dialect, user_agent="x", **IDEMPOTENCY_HEADERS)
    assert first.status_code == 200, first.text
    retry = await post(provider_gateway, body, dialect, **IDEMPOTENCY_HEADERS)
    assert retry.status_code == 200, retry.text
    assert retry.headers["content-type"].split(";")[0] == first.headers["content-type"].split(";")[0]
    (call,) = await list_all_calls(provider_gateway)
    assert call.reply["content"] == TEXT
    if not stream:
        assert TEXT in retry.text
    other = await post(
        provider_gateway, body, dialect, prefix=f"/s/{get_session_id(first)}", idempotency_key="two"
    )
    assert get_session_id(other) == get_session_id(first)
    assert await list_links(provider_gateway) == [Link.ROOT, Link.SIBLING]
