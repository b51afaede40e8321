"""Requests and responses are translated for providers that do not support the agent's dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson
import pytest
from anthropic.types import MessageCreateParams
from openai.types.chat import CompletionCreateParams
from pydantic import TypeAdapter

from instar.config import UpstreamEngineConfig
from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import ModelRequest, RequiredOutput
from instar.gateway.upstream.base import UpstreamChunk, UpstreamError
from instar.gateway.upstream.http import HttpUpstream
from instar.types import Message, Tool, ToolCall
from tests.unit.gateway.provider import ARGUMENTS, TEXT, Provider, run_provider

AGENT_DIALECTS = ("chat", "responses", "messages")
PROVIDER_DIALECTS = ("chat", "messages")
DIALECT_PAIRS = [
    (agent_dialect, provider_dialect)
    for agent_dialect in AGENT_DIALECTS
    for provider_dialect in PROVIDER_DIALECTS
    if agent_dialect != provider_dialect
]

TOOL = Tool(
    name="weather", description="Get the weather.", parameters={"properties": {"city": {"type": "string"}}}
)
CALLS = [
    ToolCall(id="functions.weather:0", name="weather", arguments=ARGUMENTS),
    ToolCall(id="call_2", name="weather", arguments='{"city": '),
]
CONVERSATION = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Weather?"),
    Message(role="assistant", content="", reasoning="Hm.", tool_calls=CALLS),
    Message(role="tool", content="18°", tool_call_id="functions.weather:0"),
    Message(role="tool", content="bad call", tool_call_id="call_2"),
    Message(role="user", content="And?"),
)
CreateUpstream = Callable[..., HttpUpstream]


@pytest.fixture
async def provider() -> AsyncGenerator[Provider]:
    async with run_provider() as provider:
        yield provider


@pytest.fixture
async def create_upstream(provider: Provider) -> AsyncGenerator[CreateUpstream]:
    upstreams: list[HttpUpstream] = []

    def create(dialect: str, **settings: Any) -> HttpUpstream:
        base_url = provider.url + ("" if dialect == "messages" else "/v1")
        upstreams.append(HttpUpstream(UpstreamEngineConfig(base_url=base_url, dialect=dialect, **settings)))
        return upstreams[-1]

    yield create
    for upstream in upstreams:
        await upstream.close()


def build_request(model: str = "plain", **fields: Any) -> ModelRequest:
    return ModelRequest(model, CONVERSATION, (TOOL,), **fields)


async def send(
    upstream: HttpUpstream, dialect: str, request: ModelRequest, headers: dict[str, str] | None = None
) -> list[UpstreamChunk]:
    response = upstream.send(request, dialect, b"original body", headers or {})
    async with aclosing(response.chunks):
        return [chunk async for chunk in response.chunks]


def join_deltas(chunks: list[UpstreamChunk]) -> Message:
    """Return the message that the deltas add up to."""
    message = Message(role="assistant", content="")
    reasoning = ""
    calls: list[ToolCall] = []
    for index, delta in [delta for chunk in chunks for delta in chunk.deltas]:
        assert index == 0
        message["content"] += delta.text
        reasoning += delta.reasoning
        if call := delta.call:
            if call.index == len(calls):
                calls.append(ToolCall(id=call.id, name=call.name, arguments=""))
            calls[call.index]["arguments"] += call.arguments
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


@pytest.mark.parametrize("model", ["plain", "tools"])
@pytest.mark.parametrize(("agent_dialect", "provider_dialect"), DIALECT_PAIRS)
async def test_translated_response_is_a_single_chunk(
    create_upstream: CreateUpstream, agent_dialect: str, provider_dialect: str, model: str
) -> None:
    (chunk,) = await send(create_upstream(provider_dialect), agent_dialect, build_request(model))
    assert (chunk.raw, chunk.deltas) == (b"", [])
    (choice,) = chunk.choices or ()
    assert choice.message["content"] == ("" if model == "tools" else TEXT)
    assert (choice.finish_reason, choice.prompt_tokens, choice.sampled_tokens) == ("stop", 12, 7)


@pytest.mark.parametrize("model", ["plain", "tools", "bytewise"])
@pytest.mark.parametrize(("agent_dialect", "provider_dialect"), DIALECT_PAIRS)
async def test_translated_deltas_add_up_to_the_reply(
    create_upstream: CreateUpstream, agent_dialect: str, provider_dialect: str, model: str
) -> None:
    chunks = await send(create_upstream(provider_dialect), agent_dialect, build_request(model, stream=True))
    assert all(chunk.raw == b"" for chunk in chunks)
    (choice,) = chunks[-1].choices or ()
    assert join_deltas(chunks) == choice.message
    assert (choice.prompt_tokens, choice.sampled_tokens) == (12, 7)
    deltas = [delta for chunk in chunks for _, delta in chunk.deltas]
    assert len(deltas) >= 4
    if model == "tools":
        arguments = "".join(delta.call.arguments for delta in deltas if delta.call)
        assert orjson.loads(arguments) == orjson.loads(ARGUMENTS)


@pytest.mark.parametrize("agent_dialect", ["responses", "messages"])
async def test_translation_builds_a_chat_request(
    provider: Provider, create_upstream: CreateUpstream, agent_dialect: str
) -> None:
    settings = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ("\n\n",), "seed": 3}
    await send(create_upstream("chat", model="m"), agent_dialect, build_request(stream=True, **settings))
    body = provider.last_request
    TypeAdapter(CompletionCreateParams).validate_python(body)
    assert body["model"] == "m"
    assert [message["role"] for message in body["messages"]] == [m["role"] for m in CONVERSATION]
    calls = body["messages"][2]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS, '{"city": ']
    assert body["messages"][3]["tool_call_id"] == calls[0]["id"] == "functions.weather:0"
    assert body["tools"] == [{"type": "function", "function": TOOL}]
    assert body["stream_options"] == {"include_usage": True}
    assert {name: body[name] for name in ("max_tokens", "temperature", "top_p", "stop", "seed")} == {
        **settings,
        "stop": ["\n\n"],
    }


@pytest.mark.parametrize("agent_dialect", ["chat", "responses"])
async def test_translation_builds_a_messages_request(
    provider: Provider, create_upstream: CreateUpstream, agent_dialect: str
) -> None:
    await send(
        create_upstream("messages", model="m"), agent_dialect, build_request(temperature=0.5, stop=("x",))
    )
    body = provider.last_request
    TypeAdapter(MessageCreateParams).validate_python(body)
    assert (body["system"], body["max_tokens"], body["stop_sequences"]) == ("Be brief.", 8192, ["x"])
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    first, second = body["messages"][1]["content"]
    assert first["input"] == orjson.loads(ARGUMENTS)
    assert second["input"] == {"arguments": '{"city": '}
    results = body["messages"][2]["content"]
    assert [block["type"] for block in results] == ["tool_result", "tool_result", "text"]
    assert results[0]["tool_use_id"] == first["id"] == "functions_weather_0"
    assert body["tools"][0]["input_schema"]["type"] == "object"


async def test_translation_keeps_the_required_tool_choice(
    provider: Provider, create_upstream: CreateUpstream
) -> None:
    other = Tool(name="other", description="", parameters={})
    cases: list[tuple[tuple[Tool, ...], Any, Any]] = [
        ((TOOL, other), "required", {"type": "any"}),
        ((other,), {"type": "function", "function": {"name": "other"}}, {"type": "tool", "name": "other"}),
    ]
    for required_tools, chat_choice, messages_choice in cases:
        required = RequiredOutput("tool_choice", None, required_tools)
        request = replace(build_request(), tools=(TOOL, other), required_output=required)
        await send(create_upstream("chat"), "messages", request)
        TypeAdapter(CompletionCreateParams).validate_python(provider.last_request)
        assert provider.last_request["tool_choice"] == chat_choice
        await send(create_upstream("messages"), "chat", request)
        TypeAdapter(MessageCreateParams).validate_python(provider.last_request)
        assert provider.last_request["tool_choice"] == messages_choice


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("seed", 1)])
async def test_translation_rejects_fields_that_anthropic_does_not_support(
    create_upstream: CreateUpstream, name: str, value: int
) -> None:
    with pytest.raises(ApiError, match=f"'{name}' is not supported") as caught:
        await send(create_upstream("messages"), "chat", build_request(**{name: value}))
    assert (caught.value.status, caught.value.param) == (400, name)


async def test_translation_rejects_unsupported_requests(create_upstream: CreateUpstream) -> None:
    with pytest.raises(ApiError, match="images"):
        await send(
            create_upstream("chat"), "messages", build_request(unsupported=(bad_request("No images."),))
        )


@pytest.mark.parametrize(
    ("provider_dialect", "agent_dialect"),
    [("responses", "chat"), ("completions", "chat"), ("chat", "completions")],
)
async def test_translation_rejects_unsupported_dialects(
    create_upstream: CreateUpstream, provider_dialect: str, agent_dialect: str
) -> None:
    with pytest.raises(
        ApiError, match=f"does not support '{agent_dialect}'; it supports: {provider_dialect}"
    ):
        await send(create_upstream(provider_dialect), agent_dialect, build_request())


async def test_translation_moves_the_agents_key_to_the_providers_header(
    provider: Provider, create_upstream: CreateUpstream
) -> None:
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "b"}
    await send(create_upstream("chat"), "messages", build_request(), headers)
    provider_headers = provider.headers[-1]
    assert provider_headers["authorization"] == "Bearer k"
    assert not {"x-api-key", "anthropic-beta", "anthropic-version"} & set(provider_headers)
    await send(
        create_upstream("messages"),
        "chat",
        build_request(),
        {"authorization": "Bearer k", "openai-project": "p"},
    )
    provider_headers = provider.headers[-1]
    assert (provider_headers["x-api-key"], provider_headers["anthropic-version"]) == ("k", "2023-06-01")
    assert not {"authorization", "openai-project"} & set(provider_headers)


async def test_translated_error_has_no_raw_body(create_upstream: CreateUpstream) -> None:
    with pytest.raises(UpstreamError, match=r"Slow down\.") as caught:
        await send(create_upstream("chat"), "messages", build_request("limited"))
    assert (caught.value.status, caught.value.retry_after, caught.value.raw) == (429, 7, b"")


async def test_translation_keeps_token_ids(create_upstream: CreateUpstream) -> None:
    for stream in (False, True):
        chunks = await send(
            create_upstream("chat", token_ids=True), "messages", build_request("exact", stream=stream)
        )
        (choice,) = chunks[-1].choices or ()
        assert choice.sampled_ids is not None
        assert choice.sampled_ids.tolist() == [7, 8, 2]
