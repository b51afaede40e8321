"""The official SDKs against a gateway whose provider has the same dialect or a different one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest

from instar.config import GatewayConfig, UpstreamEngineConfig
from instar.gateway.auth import create_key
from instar.gateway.base import OpenedSession
from instar.gateway.upstream.http import HttpUpstream
from instar.types import Call, CallStatus
from tests.unit.gateway.conftest import RunningGateway, run_gateway
from tests.unit.gateway.provider import ARGUMENTS, TEXT, Provider, run_provider

StartGateway = Callable[..., Any]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
AGENT_DIALECTS = ("chat", "responses", "messages")
DIALECT_PAIRS = [
    (agent_dialect, provider_dialect)
    for agent_dialect in AGENT_DIALECTS
    for provider_dialect in dict.fromkeys(("chat", "messages", agent_dialect))
]


@pytest.fixture
async def provider() -> AsyncGenerator[Provider]:
    async with run_provider() as provider:
        yield provider


@pytest.fixture
async def start_gateway(tmp_path: Path, provider: Provider) -> AsyncGenerator[StartGateway]:
    async with AsyncExitStack() as stack:

        async def start(dialect: str, **settings: Any) -> RunningGateway:
            base_url = provider.url + ("" if dialect == "messages" else "/v1")
            upstream = HttpUpstream(UpstreamEngineConfig(base_url=base_url, dialect=dialect, **settings))
            stack.push_async_callback(upstream.close)
            gateway = run_gateway(tmp_path / "store.db", None, None, GatewayConfig(), upstream=upstream)
            return await stack.enter_async_context(gateway)

        yield start


def create_anthropic_client(session: OpenedSession) -> anthropic.AsyncAnthropic:
    base_url = session.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=session.api_key, max_retries=0)


async def create_reply(
    gateway: RunningGateway, session: OpenedSession, agent_dialect: str, model: str
) -> tuple[str, str]:
    """Request a reply with the SDK of the agent's dialect. Return its text and its tool call arguments."""
    if agent_dialect == "messages":
        async with create_anthropic_client(session) as client:
            message = await client.messages.create(model=model, max_tokens=50, messages=MESSAGES)
        texts = [block.text for block in message.content if block.type == "text"]
        inputs = [orjson.dumps(block.input).decode() for block in message.content if block.type == "tool_use"]
        return "".join(texts), "".join(inputs)
    async with gateway.openai_client(session) as client:
        if agent_dialect == "responses":
            response = await client.responses.create(model=model, input="hi")
            call_arguments = [item.arguments for item in response.output if item.type == "function_call"]
            return response.output_text, "".join(call_arguments)
        completion = await client.chat.completions.create(model=model, messages=MESSAGES)
    chat_message = completion.choices[0].message
    arguments = [call.function.arguments for call in chat_message.tool_calls or () if call.type == "function"]
    return chat_message.content or "", "".join(arguments)


async def stream_reply(
    gateway: RunningGateway, session: OpenedSession, agent_dialect: str, model: str
) -> tuple[str, str]:
    """Like `create_reply`, but with a stream, whose text and arguments are joined."""
    text = arguments = ""
    if agent_dialect == "messages":
        async with create_anthropic_client(session) as client:
            async with client.messages.stream(model=model, max_tokens=50, messages=MESSAGES) as events:
                async for event in events:
                    text += event.text if event.type == "text" else ""
                    arguments += event.partial_json if event.type == "input_json" else ""
        return text, arguments
    async with gateway.openai_client(session) as client:
        if agent_dialect == "responses":
            async for event in await client.responses.create(model=model, input="hi", stream=True):
                text += event.delta if event.type == "response.output_text.delta" else ""
                arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
                if event.type == "response.failed":  # The SDK does not raise an error for this.
                    raise openai.OpenAIError(str(event.response.error))
            return text, arguments
        async for chunk in await client.chat.completions.create(model=model, messages=MESSAGES, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    arguments += (call.function and call.function.arguments) or ""
    return text, arguments


@pytest.mark.parametrize("model", ["plain", "tools"])
@pytest.mark.parametrize("request_reply", [create_reply, stream_reply])
@pytest.mark.parametrize(("agent_dialect", "provider_dialect"), DIALECT_PAIRS)
async def test_upstream_serves_every_agent_dialect_from_every_provider(
    start_gateway: StartGateway, agent_dialect: str, provider_dialect: str, request_reply: Any, model: str
) -> None:
    gateway = await start_gateway(provider_dialect)
    session = await gateway.open_session()
    text, arguments = await request_reply(gateway, session, agent_dialect, model)
    assert text == (TEXT if model == "plain" else "")
    assert not arguments if model == "plain" else orjson.loads(arguments) == orjson.loads(ARGUMENTS)
    (call,) = await gateway.calls(session)
    assert call.status is CallStatus.OK
    assert call.reply["content"] == text
    assert (call.trainable, call.reason) == (False, "the provider returned no token ids")
    assert call.dialect == agent_dialect


async def test_upstream_counts_tokens_for_agents_with_another_dialect(
    start_gateway: StartGateway, provider: Provider
) -> None:
    gateway = await start_gateway("messages")
    session = await gateway.open_session()
    body = {"model": "claude", "input": "hi"}
    response = await gateway.post_json("/v1/responses/input_tokens", body, session.api_key)
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 12}
    assert orjson.loads(provider.bodies[-1])["messages"][0]["role"] == "user"


async def test_upstream_exact_tokens_are_recorded(start_gateway: StartGateway) -> None:
    gateway = await start_gateway("chat", token_ids=True)
    session = await gateway.open_session()
    await create_reply(gateway, session, "chat", "exact")
    (call,) = await gateway.calls(session)
    assert call.prompt_ids.tolist() == [1, 5, 6]
    assert call.sampled_ids.tolist() == [7, 8, 2]
    assert call.logprobs.tolist() == [-0.5, -0.5, -0.5]


@pytest.mark.parametrize("agent_dialect", AGENT_DIALECTS)
async def test_upstream_error_reaches_the_agent(start_gateway: StartGateway, agent_dialect: str) -> None:
    gateway = await start_gateway("chat", also=["responses", "messages"])
    session = await gateway.open_session()
    expected = anthropic.RateLimitError if agent_dialect == "messages" else openai.RateLimitError
    with pytest.raises(expected, match="Slow down") as caught:
        await create_reply(gateway, session, agent_dialect, "limited")
    assert caught.value.response.headers["retry-after"] == "7"
    assert await gateway.calls(session) == []


@pytest.mark.parametrize("agent_dialect", AGENT_DIALECTS)
async def test_upstream_partial_reply_is_recorded_as_aborted(
    start_gateway: StartGateway, agent_dialect: str
) -> None:
    gateway = await start_gateway("chat", also=["responses", "messages"])
    session = await gateway.open_session()
    with pytest.raises((openai.OpenAIError, anthropic.APIError)):
        await stream_reply(gateway, session, agent_dialect, "truncated")
    call = await wait_for_call(gateway, session)
    assert call.status is CallStatus.ABORTED
    assert call.reply["content"]
    assert TEXT.startswith(call.reply["content"])


async def wait_for_call(gateway: RunningGateway, session: OpenedSession) -> Call:
    for _ in range(100):
        if calls := await gateway.calls(session):
            return calls[0]
        await asyncio.sleep(0.05)
    raise AssertionError("no call was recorded")


async def test_upstream_does_not_receive_session_keys(
    start_gateway: StartGateway, provider: Provider
) -> None:
    gateway = await start_gateway("chat", also=["messages"])
    session = await gateway.open_session()
    for agent_dialect in ("chat", "messages"):
        await create_reply(gateway, session, agent_dialect, "plain")
    assert session.api_key not in str(provider.headers)


async def test_upstream_receives_the_agents_own_api_key(
    start_gateway: StartGateway, provider: Provider
) -> None:
    gateway = await start_gateway("chat")
    session = await gateway.open_session()
    headers = {"x-instar-key": session.api_key}
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="provider-key", default_headers=headers, max_retries=0
    ) as client:
        await client.chat.completions.create(model="plain", messages=MESSAGES)
    provider_headers = provider.headers[-1]
    assert provider_headers["authorization"] == "Bearer provider-key"
    assert "x-instar-key" not in provider_headers
    assert session.api_key not in str(provider_headers)
    assert (await wait_for_call(gateway, session)).status is CallStatus.OK


async def test_upstream_response_can_be_continued_by_id(
    start_gateway: StartGateway, provider: Provider
) -> None:
    gateway = await start_gateway("responses")
    session = await gateway.open_session()
    async with gateway.openai_client(session) as client:
        first = await client.responses.create(model="plain", input="hi")
        await client.responses.create(model="plain", input="and?", previous_response_id=first.id)
    assert provider.last_request["previous_response_id"] == first.id == "resp_9"
    first_call, second_call = await gateway.calls(session)
    assert second_call.parent_id == first_call.call_id
    assert [message["content"] for message in second_call.messages] == ["hi", TEXT, "and?"]


async def test_upstream_response_of_another_agent_cannot_be_continued_by_id(
    start_gateway: StartGateway, provider: Provider
) -> None:
    gateway = await start_gateway("responses")
    session = await gateway.open_session()
    async with gateway.openai_client(session) as client:
        first = await client.responses.create(model="plain", input="hi")
    body = {"model": "plain", "input": "and?", "previous_response_id": first.id}
    for key in (await create_key(gateway.store, "agent", "other"), (await gateway.open_session()).api_key):
        response = await gateway.post_json("/v1/responses", body, key)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "previous_response_id")
    assert "previous_response_id" not in provider.last_request, "the provider received a rejected request"
    body["previous_response_id"] = "resp_provider"
    assert (await gateway.post_json("/v1/responses", body, session.api_key)).status_code == 200
    assert provider.last_request["previous_response_id"] == "resp_provider"
