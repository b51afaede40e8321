"""The Responses API: the official `openai` SDK against a running gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from instar.gateway.base import OpenedSession
from instar.types import Link
from tests.unit.gateway.conftest import RunningGateway

TOOL: Any = {
    "type": "function",
    "name": "calc",
    "description": "Evaluate arithmetic.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    "strict": False,
}


def client_options(session: OpenedSession) -> dict[str, Any]:
    return {"base_url": session.base_url, "api_key": session.api_key, "max_retries": 0}


async def create_async(session: OpenedSession, **params: Any) -> Any:
    async with openai.AsyncOpenAI(**client_options(session)) as client:
        return await client.responses.create(**params)


async def stream_async(session: OpenedSession, **params: Any) -> Any:
    async with (
        openai.AsyncOpenAI(**client_options(session)) as client,
        client.responses.stream(**params) as stream,
    ):
        return await stream.get_final_response()


async def create_sync(session: OpenedSession, **params: Any) -> Any:
    def create() -> Any:
        with openai.OpenAI(**client_options(session)) as client:
            return client.responses.create(**params)

    return await asyncio.to_thread(create)


async def stream_sync(session: OpenedSession, **params: Any) -> Any:
    def create() -> Any:
        with openai.OpenAI(**client_options(session)) as client, client.responses.stream(**params) as stream:
            return stream.get_final_response()

    return await asyncio.to_thread(create)


CREATE_FUNCTIONS = [create_async, stream_async, create_sync, stream_sync]


def make_tool_result(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "7440"}


@pytest.mark.parametrize("create_response", CREATE_FUNCTIONS)
async def test_openai_sdk_tool_turns_extend_the_recorded_call(
    gateway: RunningGateway, create_response: Callable[..., Any]
) -> None:
    session = await gateway.open_session(channel="train")
    params: dict[str, Any] = {"model": "instar", "instructions": "Be exact.", "tools": [TOOL]}
    items: list[Any] = [{"role": "user", "content": "What is 24 * 310?"}]
    first = await create_response(session, input=items, **params)
    assert first.output_text.strip() == "Let me see."
    call = first.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "calc", '{"expression": "24 * 310"}')
    items += [*first.output, make_tool_result(call)]
    second = await create_response(session, input=items, **params)
    assert second.output_text == "The answer is 7440."
    items += [*second.output, {"role": "user", "content": "thanks"}]
    third = await create_response(session, input=items, **params)
    assert third.output_text == "You said: thanks"
    assert third.usage.total_tokens == third.usage.input_tokens + third.usage.output_tokens
    assert [call.link for call in await gateway.calls(session)] == [Link.ROOT, Link.EXTENDS, Link.EXTENDS]


@pytest.mark.parametrize("create_response", CREATE_FUNCTIONS)
async def test_openai_sdk_continues_a_response_by_id(
    gateway: RunningGateway, create_response: Callable[..., Any]
) -> None:
    session = await gateway.open_session(channel="train")
    params: dict[str, Any] = {"model": "instar", "tools": [TOOL]}
    first = await create_response(session, input="What is 24 * 310?", instructions="Be exact.", **params)
    call = first.output[-1]
    second = await create_response(
        session,
        input=[make_tool_result(call)],
        instructions="Be exact.",
        previous_response_id=first.id,
        **params,
    )
    assert second.output_text == "The answer is 7440."
    assert second.previous_response_id == first.id
    calls = await gateway.calls(session)
    assert [call.link for call in calls] == [Link.ROOT, Link.EXTENDS]
    roles = [message["role"] for message in calls[1].messages]
    assert roles == ["system", "user", "assistant", "tool"]


async def test_openai_sdk_instructions_are_not_inherited(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    first = await create_async(session, model="instar", input="Hello", instructions="One.")
    await create_async(
        session, model="instar", input="Again", instructions="Two.", previous_response_id=first.id
    )
    await create_async(session, model="instar", input="Again", previous_response_id=first.id)
    calls = await gateway.calls(session)
    system_texts = [
        [message["content"] for message in call.messages if message["role"] == "system"] for call in calls
    ]
    assert system_texts == [["One."], ["Two."], []]


async def test_openai_sdk_unknown_previous_response_is_rejected(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    with pytest.raises(openai.APIStatusError) as caught:
        await create_async(session, model="instar", input="Hello", previous_response_id="resp_unknown")
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == "previous_response_id"


async def test_openai_sdk_receives_text_in_pieces(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    params: dict[str, Any] = {"model": "instar", "input": "Some words to say again", "stream": True}
    async with openai.AsyncOpenAI(**client_options(session)) as client:
        events = [event async for event in await client.responses.create(**params)]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == "You said: Some words to say again"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"


async def test_openai_sdk_truncated_reply_is_incomplete(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    response = await create_async(session, model="instar", input="long", max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_openai_sdk_receives_logprobs(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    params: dict[str, Any] = {"model": "instar", "input": "Hi", "include": ["message.output_text.logprobs"]}
    response = await create_async(session, **params)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(token.token for token in logprobs) == response.output_text
    assert all(token.logprob <= 0 for token in logprobs)


async def test_openai_sdk_raises_its_own_error(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    with pytest.raises(openai.BadRequestError) as caught:
        await create_async(session, model="instar", input="Hi", truncation="auto")
    assert (caught.value.param, caught.value.code) == ("truncation", "unsupported_value")
    assert not await gateway.calls(session)


async def test_responses_input_token_count_matches_the_usage(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(base_url=session.base_url, headers=headers) as client:
        body = {"model": "instar", "input": "Hello"}
        count = (await client.post("/responses/input_tokens", json=body)).json()
    response = await create_async(session, model="instar", input="Hello")
    assert count == {"object": "response.input_tokens", "input_tokens": response.usage.input_tokens}
