"""The official `anthropic` SDK against a running gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import orjson
import pytest

from instar.config import GatewayConfig, UpstreamEngineConfig
from instar.gateway.base import OpenedSession
from instar.gateway.upstream.http import HttpUpstream
from instar.types import Link
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, run_gateway
from tests.unit.gateway.provider import TEXT, run_provider

TOOL: Any = {
    "name": "calc",
    "description": "Evaluate arithmetic.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def client_options(session: OpenedSession) -> dict[str, Any]:
    """Return the client's options. The base URL has no `/v1`, because the SDK adds it."""
    return {"base_url": session.base_url.removesuffix("/v1"), "api_key": session.api_key, "max_retries": 0}


async def create_async(session: OpenedSession, **parameters: Any) -> Any:
    async with anthropic.AsyncAnthropic(**client_options(session)) as client:
        return await client.messages.create(**parameters)


async def stream_async(session: OpenedSession, **parameters: Any) -> Any:
    async with anthropic.AsyncAnthropic(**client_options(session)) as client:
        async with client.messages.stream(**parameters) as stream:
            return await stream.get_final_message()


async def create_sync(session: OpenedSession, **parameters: Any) -> Any:
    def create() -> Any:
        with anthropic.Anthropic(**client_options(session)) as client:
            return client.messages.create(**parameters)

    return await asyncio.to_thread(create)


async def stream_sync(session: OpenedSession, **parameters: Any) -> Any:
    def create() -> Any:
        with anthropic.Anthropic(**client_options(session)) as client:
            with client.messages.stream(**parameters) as stream:
                return stream.get_final_message()

    return await asyncio.to_thread(create)


CREATE_FUNCTIONS = [create_async, stream_async, create_sync, stream_sync]


@pytest.mark.parametrize("create_message", CREATE_FUNCTIONS)
async def test_anthropic_sdk_tool_turns_extend_the_recorded_tokens(
    gateway: RunningGateway, create_message: Callable[..., Any]
) -> None:
    session = await gateway.open_session(channel="train")
    parameters: dict[str, Any] = {
        "model": "instar",
        "max_tokens": 200,
        "system": "Be exact.",
        "tools": [TOOL],
    }
    messages = [user("What is 24 * 310?")]
    first = await create_message(session, messages=messages, **parameters)
    reply_text, tool_use = first.content
    assert reply_text.text.strip() == "Let me see."
    assert (tool_use.name, tool_use.input) == ("calc", {"expression": "24 * 310"})
    assert first.stop_reason == "tool_use"
    assert first.id.startswith("msg")
    result = {
        "type": "tool_result",
        "tool_use_id": tool_use.id,
        "content": [{"type": "text", "text": "7440"}],
    }
    messages += [first.to_param(), user([result])]
    second = await create_message(session, messages=messages, **parameters)
    assert second.content[0].text == "The answer is 7440."
    assert second.stop_reason == "end_turn"
    messages += [second.to_param(), user([{"type": "text", "text": "thanks"}])]
    third = await create_message(session, messages=messages, **parameters)
    assert third.content[0].text == "You said: thanks"
    calls = await gateway.calls(session)
    assert [call.link for call in calls] == [Link.ROOT, Link.EXTENDS, Link.EXTENDS]
    for call, next_call, response in zip(calls, calls[1:], [first, second], strict=False):
        sequence = call.sequence.tolist()
        assert next_call.prompt_ids[: len(sequence)].tolist() == sequence
        assert response.usage.input_tokens + response.usage.cache_read_input_tokens == len(call.prompt_ids)
        assert response.usage.output_tokens == len(call.sampled_ids)
        assert call.request_id == response.id
        assert call.dialect == "messages"
        assert call.trainable


async def test_anthropic_sdk_receives_text_and_arguments_in_pieces(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    async with anthropic.AsyncAnthropic(**client_options(session)) as client:
        stream = await client.messages.create(
            model="instar", max_tokens=200, messages=[user("What is 24 * 310?")], tools=[TOOL], stream=True
        )
        events = [event async for event in stream]
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert sum(delta.type == "text_delta" for delta in deltas) > 3
    arguments = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert "".join(arguments) == '{"expression": "24 * 310"}'
    assert len(arguments) > 3


async def test_anthropic_sdk_receives_the_stop_reason(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    parameters: dict[str, Any] = {"model": "instar", "messages": [user("long")]}
    truncated = await create_async(session, max_tokens=3, **parameters)
    assert truncated.stop_reason == "max_tokens"
    stopped = await stream_async(session, max_tokens=99, stop_sequences=["rd w"], **parameters)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rd w")
    assert stopped.content[0].text == "wo"


async def test_anthropic_sdk_raises_its_own_errors(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    parameters: dict[str, Any] = {"model": "instar", "max_tokens": 8}
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]") as caught:
        await create_async(session, messages=[user([image])], **parameters)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    session.api_key = "sk-wrong"
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await create_async(session, messages=[user("hi")], **parameters)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert await gateway.calls(session) == []


async def test_anthropic_sdk_tool_choice_of_an_unknown_tool_is_rejected(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    with pytest.raises(anthropic.BadRequestError, match=r"'other' is not in 'tools'"):
        await create_async(
            session,
            model="instar",
            max_tokens=64,
            messages=[user("hi")],
            tools=[TOOL],
            tool_choice={"type": "tool", "name": "other"},
        )


@pytest.mark.parametrize("dialect", ["messages", "chat"])
async def test_anthropic_sdk_provider_features_need_an_anthropic_provider(
    tmp_path: Path, dialect: str
) -> None:
    """A Messages provider gets the request unchanged. With a chat provider, the gateway rejects it."""
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    parameters: dict[str, Any] = {
        "model": "plain",
        "max_tokens": 8,
        "messages": [user([image, {"type": "text", "text": "What is it?"}])],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }
    async with run_provider() as provider, AsyncExitStack() as stack:
        base_url = provider.url + ("" if dialect == "messages" else "/v1")
        upstream = HttpUpstream(UpstreamEngineConfig(base_url=base_url, dialect=dialect))
        stack.push_async_callback(upstream.close)
        context = run_gateway(tmp_path / "store.db", None, None, GatewayConfig(), upstream=upstream)
        gateway = await stack.enter_async_context(context)
        session = await gateway.open_session()
        if dialect == "chat":
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
                await create_async(session, **parameters)
            assert provider.bodies == []
        else:
            response = await create_async(session, **parameters)
            assert response.content[0].text == TEXT
            assert orjson.loads(provider.bodies[0]) == parameters
            (call,) = await gateway.calls(session)
            assert call.messages[0]["content"].startswith("[image ")


async def test_anthropic_sdk_counts_tokens(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    parameters: dict[str, Any] = {
        "model": "instar",
        "system": "Be exact.",
        "messages": [user("hi")],
        "tools": [TOOL],
    }
    async with anthropic.AsyncAnthropic(**client_options(session)) as client:
        count = await client.messages.count_tokens(**parameters)
        response = await client.messages.create(max_tokens=8, **parameters)
    assert count.input_tokens == response.usage.input_tokens + response.usage.cache_read_input_tokens
    assert len(await gateway.calls(session)) == 1


async def test_anthropic_sdk_lists_models(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    async with anthropic.AsyncAnthropic(**client_options(session)) as client:
        models = [model async for model in client.models.list()]
    assert {model.type for model in models} == {"model"}


async def test_anthropic_sdk_beta_request_is_accepted(gateway: RunningGateway) -> None:
    """Claude Code sends `?beta=true`, the names of the betas in a header, and their settings in the body."""
    session = await gateway.open_session()
    async with anthropic.AsyncAnthropic(**client_options(session)) as client:
        response = await client.beta.messages.create(
            model="instar",
            max_tokens=64,
            messages=[user("hi")],
            betas=["context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            thinking={"type": "adaptive"},
        )
    assert response.content[0].text == "You said: hi"  # type: ignore[union-attr]


async def test_messages_session_is_found_by_claude_code_id(gateway: RunningGateway) -> None:
    body = {"model": "instar", "max_tokens": 8, "messages": [user("hi")]}
    headers = {"x-api-key": ADMIN_KEY}

    async def send(session_id: str) -> httpx.Response:
        metadata = {"user_id": f"user_1_account_2_session_{session_id}"}
        return await gateway.http.post("/v1/messages", json={**body, "metadata": metadata}, headers=headers)

    for session_id in ("a-1", "b-2", "a-1"):
        assert (await send(session_id)).status_code == 200
    sessions = [
        await gateway.store.session_by_external_id("run", "agent", f"claude-session:{session_id}")
        for session_id in ("a-1", "b-2")
    ]
    call_counts = [len(await gateway.store.calls(session.session_id)) for session in sessions if session]
    assert call_counts == [2, 1]
