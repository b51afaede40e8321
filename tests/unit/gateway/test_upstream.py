"""HttpUpstream: forwarded requests and responses, parsed replies, failures and token ids."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from instar.config import UpstreamEngineConfig
from instar.errors import ConfigError, EngineUnavailable
from instar.gateway.base import ApiError
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.upstream.base import UpstreamChunk, UpstreamError
from instar.gateway.upstream.http import HttpUpstream
from instar.types import Message
from tests.unit.gateway.provider import (
    ARGUMENTS,
    RESPONSE_BUILDERS,
    TEXT,
    Provider,
    encode_events,
    run_provider,
)

DIALECTS = ("chat", "completions", "responses", "messages")
RESPONSE_IDS = {"chat": "chatcmpl-9", "completions": "cmpl-9", "responses": "resp_9", "messages": "msg_9"}
TOOL_DIALECTS = ("chat", "responses", "messages")
MESSAGES = [{"role": "user", "content": "hi"}]
CreateUpstream = Callable[..., HttpUpstream]


@pytest.fixture
async def provider() -> AsyncGenerator[Provider]:
    async with run_provider() as provider:
        yield provider


@pytest.fixture(params=["direct", "proxied"])
async def create_upstream(
    provider: Provider, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[CreateUpstream]:
    """A function that creates upstreams. In the proxied case, the provider is also the HTTP proxy."""
    upstreams: list[HttpUpstream] = []
    provider_url = provider.url
    if request.param == "proxied":
        monkeypatch.setenv("http_proxy", provider.url)
        provider_url = "http://provider.test"

    def create(dialect: str = "chat", **settings: Any) -> HttpUpstream:
        base_url = provider_url + ("" if dialect == "messages" else "/v1")
        upstreams.append(HttpUpstream(UpstreamEngineConfig(base_url=base_url, dialect=dialect, **settings)))
        return upstreams[-1]

    yield create
    for upstream in upstreams:
        await upstream.close()


async def send(
    upstream: HttpUpstream,
    dialect: str,
    model: str = "plain",
    headers: dict[str, str] | None = None,
    overrides: dict[str, Any] | None = None,
    **fields: Any,
) -> list[UpstreamChunk]:
    body = orjson.dumps({"model": model, "messages": MESSAGES, **fields})
    request = ModelRequest(model, (), stream=fields.get("stream", False), n=fields.get("n", 1))
    response = upstream.send(request, dialect, body, headers or {}, overrides)
    async with aclosing(response.chunks):
        return [chunk async for chunk in response.chunks]


def get_message(chunk: UpstreamChunk) -> Any:
    assert chunk.choices is not None
    return chunk.choices[0].message


# --- forwarding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_response_passes_through_unchanged(
    provider: Provider, create_upstream: CreateUpstream, dialect: str
) -> None:
    (chunk,) = await send(create_upstream(dialect), dialect)
    assert orjson.loads(chunk.raw) == RESPONSE_BUILDERS[dialect][0]("plain", 1)
    assert chunk.content_type == "application/json; charset=utf-8"
    assert get_message(chunk) == {"role": "assistant", "content": TEXT}
    (choice,) = chunk.choices or ()
    assert (choice.prompt_tokens, choice.sampled_tokens) == (12, 7)
    assert choice.finish_reason == ("length" if dialect == "completions" else "stop")
    assert choice.sampled_ids is None
    assert chunk.response_id == RESPONSE_IDS[dialect]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_request_body_is_forwarded_unchanged(
    provider: Provider, create_upstream: CreateUpstream, dialect: str
) -> None:
    body = b'{ "model":"plain",\n "messages": [ {"role":"user","content":"h\\u0069"} ], "x" : 1.0e0 }'
    response = create_upstream(dialect).send(ModelRequest("plain", ()), dialect, body, {})
    async with aclosing(response.chunks):
        assert [chunk async for chunk in response.chunks]
    assert provider.bodies == [body]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
async def test_upstream_response_yields_tool_calls_and_reasoning(
    create_upstream: CreateUpstream, dialect: str, stream: bool
) -> None:
    chunks = await send(create_upstream(dialect), dialect, "tools", stream=stream)
    message = get_message(chunks[-1])
    assert (message["content"], message["reasoning"]) == ("", "Look it up.")
    (call,) = message["tool_calls"]
    assert call["name"] == "weather"
    assert call["id"] == ("toolu_1" if dialect == "messages" else "call_1")
    assert orjson.loads(call["arguments"]) == orjson.loads(ARGUMENTS)


@pytest.mark.parametrize("model", ["plain", "bytewise", "crlf"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_stream_passes_through_unchanged(
    create_upstream: CreateUpstream, dialect: str, model: str
) -> None:
    chunks = await send(create_upstream(dialect), dialect, model, stream=True)
    has_event_names = dialect in ("responses", "messages")
    expected = b"".join(
        encode_events(RESPONSE_BUILDERS[dialect][1](model, 1), has_event_names, model == "crlf")
    )
    assert b"".join(chunk.raw for chunk in chunks) == expected
    assert get_message(chunks[-1])["content"] == TEXT
    assert chunks[-1].response_id == RESPONSE_IDS[dialect]
    assert [chunk.choices for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[0].content_type == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("model", ["plain", "bytewise"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_stream_end_is_in_the_last_chunk(
    create_upstream: CreateUpstream, dialect: str, model: str
) -> None:
    chunks = await send(create_upstream(dialect), dialect, model, stream=True)
    earlier_bytes = b"".join(chunk.raw for chunk in chunks[:-1])
    end_markers = {
        "chat": b'"finish_reason":"stop"',
        "completions": b'"finish_reason":"length"',
        "responses": b"response.completed",
        "messages": b'"stop_reason":"end_turn"',
    }
    assert end_markers[dialect] not in earlier_bytes
    assert end_markers[dialect] in chunks[-1].raw
    assert earlier_bytes.endswith(b"\n\n")


async def test_upstream_stream_is_forwarded_while_it_arrives(
    provider: Provider, create_upstream: CreateUpstream
) -> None:
    provider.gate = asyncio.Event()
    request = ModelRequest("plain", (), stream=True)
    body = orjson.dumps({"model": "plain", "stream": True, "messages": MESSAGES})
    response = create_upstream().send(request, "chat", body, {})
    async with aclosing(response.chunks):
        first = await asyncio.wait_for(anext(response.chunks), 5)
        assert b"chat.completion.chunk" in first.raw or b": comment" in first.raw
        provider.gate.set()
        later_chunks = [chunk async for chunk in response.chunks]
        assert later_chunks[-1].choices


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_stream_does_not_wait_after_its_last_event(
    create_upstream: CreateUpstream, dialect: str
) -> None:
    chunks = await asyncio.wait_for(send(create_upstream(dialect), dialect, "keep_open", stream=True), 5)
    assert get_message(chunks[-1])["content"] == TEXT


async def test_upstream_stream_ends_with_its_last_choice(create_upstream: CreateUpstream) -> None:
    chunks = await send(create_upstream(), "chat", n=2, stream=True)
    earlier_bytes = b"".join(chunk.raw for chunk in chunks[:-1])
    assert earlier_bytes.count(b'"finish_reason":"stop"') == 1
    assert [choice.message["content"] for choice in chunks[-1].choices or ()] == [TEXT, TEXT]
    assert sum(choice.sampled_tokens for choice in chunks[-1].choices or ()) == 7


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_error_is_forwarded(
    create_upstream: CreateUpstream, dialect: str, stream: bool
) -> None:
    with pytest.raises(UpstreamError) as caught:
        await send(create_upstream(dialect), dialect, "limited", stream=stream)
    error = caught.value
    assert (error.status, error.retry_after, error.message, error.code) == (429, 7, "Slow down.", "slow")
    assert orjson.loads(error.raw)["error"]["type"] == "rate_limit_error"


async def test_upstream_error_without_json_is_forwarded(create_upstream: CreateUpstream) -> None:
    with pytest.raises(UpstreamError, match="Internal Server Error") as caught:
        await send(create_upstream(), "chat", "broken")
    assert caught.value.status == 500


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_invalid_response_raises_a_502_error(
    create_upstream: CreateUpstream, dialect: str
) -> None:
    with pytest.raises(UpstreamError, match="cannot be read") as caught:
        await send(create_upstream(dialect), dialect, "malformed")
    assert (caught.value.status, caught.value.raw) == (502, b"")


@pytest.mark.parametrize("model", ["truncated", "disconnecting"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_broken_stream_raises_and_keeps_partial_choices(
    create_upstream: CreateUpstream, dialect: str, model: str
) -> None:
    request = ModelRequest(model, (), stream=True)
    body = orjson.dumps({"model": model, "stream": True})
    response = create_upstream(dialect).send(request, dialect, body, {})
    assert response.partial_choices() == []
    with pytest.raises(EngineUnavailable, match="before the end"):
        _ = [chunk async for chunk in response.chunks]
    (choice,) = response.partial_choices()
    text = choice.message["content"]
    assert text
    assert TEXT.startswith(text)
    assert choice.finish_reason == "aborted"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_upstream_closed_response_keeps_partial_choices(
    provider: Provider, create_upstream: CreateUpstream, dialect: str
) -> None:
    provider.gate = asyncio.Event()
    request = ModelRequest("plain", (), stream=True)
    body = orjson.dumps({"model": "plain", "stream": True})
    response = create_upstream(dialect).send(request, dialect, body, {})
    async with aclosing(response.chunks):
        while not response.partial_choices():
            await asyncio.wait_for(anext(response.chunks), 5)
    provider.gate.set()
    (choice,) = response.partial_choices()
    assert choice.finish_reason == "aborted"
    assert TEXT.startswith(choice.message["content"])


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_upstream_error_in_a_stream_comes_after_earlier_chunks(
    create_upstream: CreateUpstream, dialect: str
) -> None:
    request = ModelRequest("failing", (), stream=True)
    body = orjson.dumps({"model": "failing", "stream": True})
    response = create_upstream(dialect).send(request, dialect, body, {})
    chunks: list[UpstreamChunk] = []

    async def read_chunks() -> None:
        async for chunk in response.chunks:
            chunks.append(chunk)

    with pytest.raises(UpstreamError, match="Overloaded") as caught:
        await read_chunks()
    assert caught.value.status == 529
    assert chunks
    assert b"Overloaded" not in b"".join(chunk.raw for chunk in chunks)


async def test_upstream_unreachable_provider_raises_engine_unavailable() -> None:
    upstream = HttpUpstream(UpstreamEngineConfig(base_url="http://127.0.0.1:1/v1"))
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await send(upstream, "chat")
    await upstream.close()


# --- requests and settings ----------------------------------------------------------------------


async def test_upstream_request_changes_only_the_model(
    provider: Provider, create_upstream: CreateUpstream
) -> None:
    body = b'{"model":"gpt-5","messages":[ {"role":"user","content":"h\\u0069"} ],"x":1.0e0}'
    response = create_upstream(model="plain").send(ModelRequest("gpt-5", ()), "chat", body, {})
    async with aclosing(response.chunks):
        assert [chunk async for chunk in response.chunks]
    assert provider.bodies == [body.replace(b"gpt-5", b"plain")]


@pytest.mark.parametrize(
    ("dialect", "limit_field"),
    [("chat", "max_tokens"), ("messages", "max_tokens"), ("responses", "max_output_tokens")],
)
async def test_upstream_sampling_overrides_replace_agent_values(
    provider: Provider, create_upstream: CreateUpstream, dialect: str, limit_field: str
) -> None:
    overrides = {"temperature": 0, "max_tokens": 5}
    await send(create_upstream(dialect), dialect, overrides=overrides, temperature=0.7)
    assert (provider.last_request["temperature"], provider.last_request[limit_field]) == (0, 5)


async def test_upstream_large_body_is_forwarded(provider: Provider, create_upstream: CreateUpstream) -> None:
    await send(create_upstream(), "chat", padding="x" * (3 << 20))
    assert len(provider.bodies[0]) > 3 << 20


async def test_upstream_forwards_only_known_headers(
    provider: Provider, create_upstream: CreateUpstream
) -> None:
    agent_headers = {
        "authorization": "Bearer sk-agent",
        "openai-organization": "org-1",
        "user-agent": "agent/1",
        "cookie": "a=b",
        "host": "other.example",
        "connection": "close",
        "x-instar-session": "s",
        "content-length": "1",
    }
    await send(create_upstream(headers={"x-extra": "1", "user-agent": "ours"}), "chat", headers=agent_headers)
    headers = provider.headers[0]
    assert headers["authorization"] == "Bearer sk-agent"
    assert (headers["openai-organization"], headers["x-extra"], headers["user-agent"]) == (
        "org-1",
        "1",
        "ours",
    )
    assert not {"cookie", "x-instar-session"} & set(headers)
    assert headers["host"] != "other.example"
    assert headers.get("connection") != "close"


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_upstream_environment_key_replaces_the_agent_key(
    provider: Provider, create_upstream: CreateUpstream, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "sk-provider")
    agent_headers = {"authorization": "Bearer sk-agent", "x-api-key": "sk-agent"}
    await send(create_upstream(dialect, api_key_env="PROVIDER_KEY"), dialect, headers=agent_headers)
    headers = provider.headers[0]
    assert "sk-agent" not in str(headers)
    if dialect == "messages":
        assert (headers["x-api-key"], headers["anthropic-version"]) == ("sk-provider", "2023-06-01")
        assert "authorization" not in headers
    else:
        assert headers["authorization"] == "Bearer sk-provider"


@pytest.mark.parametrize(
    ("headers", "name", "value"),
    [
        ({"x-api-key": "k"}, "x-api-key", "k"),
        ({"authorization": "Bearer oat", "anthropic-version": "v"}, "authorization", "Bearer oat"),
        ({"authorization": "Bearer k"}, "x-api-key", "k"),
    ],
)
async def test_upstream_agent_key_is_forwarded_to_anthropic(
    provider: Provider, create_upstream: CreateUpstream, headers: dict[str, str], name: str, value: str
) -> None:
    await send(create_upstream("messages"), "messages", headers=headers)
    assert provider.headers[0][name] == value


def test_upstream_config_errors_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROVIDER_KEY", raising=False)
    config = UpstreamEngineConfig(base_url="http://x/v1", api_key_env="PROVIDER_KEY")
    with pytest.raises(ConfigError, match=r"upstreams\.a\.api_key_env: .*'PROVIDER_KEY' is not set"):
        HttpUpstream(config, "upstreams.a")
    with pytest.raises(ConfigError, match=r"engine\.base_url: .* got 'localhost:8000'"):
        HttpUpstream(UpstreamEngineConfig(base_url="localhost:8000"))


@pytest.mark.parametrize(("base_path", "dialect"), [("/v1", "messages"), ("/v1/", "chat"), ("/", "messages")])
async def test_upstream_accepts_base_url_with_or_without_v1(
    provider: Provider, base_path: str, dialect: str
) -> None:
    config = UpstreamEngineConfig(
        base_url=provider.url + base_path, dialect=dialect, also=["chat", "messages"]
    )
    upstream = HttpUpstream(config)
    for agent_dialect in ("chat", "messages"):
        assert (await send(upstream, agent_dialect))[-1].choices
    await upstream.close()


async def test_upstream_counts_tokens_if_the_provider_supports_it(
    provider: Provider, create_upstream: CreateUpstream
) -> None:
    body = orjson.dumps({"model": "claude", "messages": MESSAGES})
    request = ModelRequest(model="claude", messages=(Message(role="user", content="hi"),))
    response = await create_upstream("messages", model="m").count_tokens(request, "messages", body, {})
    assert orjson.loads(response) == {"input_tokens": 12}
    assert provider.last_request["model"] == "m"
    with pytest.raises(ApiError, match="cannot count"):
        await create_upstream("chat").count_tokens(request, "messages", body, {})


async def test_upstream_translates_token_count_requests_of_other_dialects(
    provider: Provider, create_upstream: CreateUpstream
) -> None:
    system, user = Message(role="system", content="Be brief."), Message(role="user", content="hi")
    request = ModelRequest(model="claude", messages=(system, user), temperature=0.5, max_tokens=9)
    body = orjson.dumps({"model": "claude", "input": "hi", "instructions": "Be brief."})
    response = await create_upstream("messages", model="m").count_tokens(request, "responses", body, {})
    assert orjson.loads(response) == {"input_tokens": 12}
    counted = orjson.loads(provider.bodies[-1])
    assert counted.keys() == {"model", "system", "messages"}
    assert (counted["model"], counted["system"]) == ("m", "Be brief.")


# --- token ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["chat", "completions"])
async def test_upstream_token_ids_are_requested_and_stripped(
    provider: Provider, create_upstream: CreateUpstream, dialect: str
) -> None:
    (chunk,) = await send(create_upstream(dialect, token_ids=True), dialect, "exact", temperature=0.5)
    assert provider.last_request["return_token_ids"] is True
    assert provider.last_request["logprobs"] == (True if dialect == "chat" else 0)
    assert (provider.last_request["temperature"], provider.last_request["top_p"]) == (0.5, 1.0)
    (choice,) = chunk.choices or ()
    assert choice.prompt_ids is not None
    assert choice.sampled_ids is not None
    assert choice.sampled_logprobs is not None
    assert choice.prompt_ids.tolist() == [1, 5, 6]
    assert choice.sampled_ids.tolist() == [7, 8, 2]
    assert choice.sampled_logprobs.tolist()[:2] == [-0.5, -0.5]
    assert math.isnan(choice.sampled_logprobs[2]) == (dialect == "completions")
    assert (choice.prompt_tokens, choice.sampled_tokens) == (3, 3)
    assert b"token_ids" not in chunk.raw
    assert orjson.loads(chunk.raw)["choices"][0]["logprobs"] is None


async def test_upstream_token_ids_are_stripped_from_streams(create_upstream: CreateUpstream) -> None:
    chunks = await send(create_upstream(token_ids=True), "chat", "exact", stream=True)
    (choice,) = chunks[-1].choices or ()
    assert choice.sampled_ids is not None
    assert choice.sampled_logprobs is not None
    assert choice.sampled_ids.tolist() == [7, 8, 2]
    assert choice.sampled_logprobs.tolist() == [-0.5, -0.5, -0.25]
    raw = b"".join(chunk.raw for chunk in chunks)
    assert b"token_ids" not in raw
    assert b'"logprob":' not in raw
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_upstream_token_ids_are_kept_if_the_agent_requests_them(
    create_upstream: CreateUpstream,
) -> None:
    upstream = create_upstream(token_ids=True)
    (chunk,) = await send(upstream, "chat", "exact", logprobs=True, return_token_ids=True)
    response = orjson.loads(chunk.raw)
    assert response["prompt_token_ids"] == [1, 5, 6]
    assert response["choices"][0]["token_ids"] == [7, 8, 2]
    assert response["choices"][0]["logprobs"]


async def test_upstream_response_without_token_ids_has_none(create_upstream: CreateUpstream) -> None:
    (chunk,) = await send(create_upstream(token_ids=True), "chat")
    assert [choice.sampled_ids for choice in chunk.choices or ()] == [None]
