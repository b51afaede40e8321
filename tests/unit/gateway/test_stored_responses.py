"""Item references, stored responses and their input items: the `openai` SDK against a running gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.auth import create_key
from instar.gateway.base import OpenedSession
from instar.record.base import Renderer
from instar.types import Link
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.test_wire_types import validate
from tests.unit.gateway.wire import run_scripted_gateway

TOOL: Any = {
    "type": "function",
    "name": "calc",
    "description": "Evaluate arithmetic.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    "strict": None,
}
QUESTION: Any = {"type": "message", "role": "user", "content": "What is 24 * 310?"}
PARAMS: dict[str, Any] = {"model": "instar", "instructions": "Be exact.", "tools": [TOOL]}


def make_tool_result(response: Response) -> Any:
    call: Any = response.output[-1]
    return {"type": "function_call_output", "call_id": call.call_id, "output": "7440"}


def make_references(response: Response) -> list[Any]:
    return [{"type": "item_reference", "id": item.id} for item in response.output]


@pytest.fixture
async def session(gateway: RunningGateway) -> OpenedSession:
    return await gateway.open_session(channel="train")


@pytest.fixture
async def client(gateway: RunningGateway, session: OpenedSession) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.openai_client(session) as client:
        yield client


# --- item references ----------------------------------------------------------------------------


async def check_continues(gateway: RunningGateway, session: OpenedSession) -> None:
    """Check that each call of the session continues the tokens of the one before."""
    calls = await gateway.calls(session)
    assert [call.link for call in calls] == [Link.ROOT, *[Link.EXTENDS] * (len(calls) - 1)]
    for parent, call in pairwise(calls):
        sequence = parent.sequence.tolist()
        assert call.prompt_ids[: len(sequence)].tolist() == sequence
        assert call.base_messages == len(parent.messages) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_request_with_item_references_continues_the_recorded_tokens(
    gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI, stream: bool
) -> None:
    async def create(items: list[Any]) -> Any:
        if not stream:
            return await client.responses.create(input=items, **PARAMS)
        async with client.responses.stream(input=items, **PARAMS) as events:
            return await events.get_final_response()

    items = [QUESTION]
    first = await create(items)
    assert [item.type for item in first.output] == ["message", "function_call"]
    items += [*make_references(first), make_tool_result(first)]
    second = await create(items)
    assert second.output_text == "The answer is 7440."
    items += [{"id": second.output[0].id}, {"role": "user", "content": "thanks"}]
    third = await create(items)
    assert third.output_text == "You said: thanks"
    await check_continues(gateway, session)
    assert (await gateway.calls(session))[2].messages[2] == (await gateway.calls(session))[0].reply


async def test_item_references_are_resolved_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> None:
    async with run_scripted_gateway(tmp_path / "store.db", model, renderer) as gateway:
        session = await gateway.open_session(channel="train")
        async with gateway.openai_client(session) as client:
            first = await client.responses.create(input=[QUESTION], **PARAMS)
    async with run_scripted_gateway(tmp_path / "store.db", model, renderer) as gateway:
        base_url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=session.api_key) as client:
            items = [QUESTION, *make_references(first), make_tool_result(first)]
            second = await client.responses.create(input=items, **PARAMS)
            assert second.output_text == "The answer is 7440."
            assert (await client.responses.retrieve(first.id)).output == first.output
        await check_continues(gateway, session)


async def test_referenced_text_and_a_sent_call_are_one_turn(
    gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI
) -> None:
    """The AI SDK refers to texts by their ids, but sends tool calls."""
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    call = first.output[1].to_dict()
    sent_call: Any = {key: call[key] for key in ("type", "call_id", "name", "arguments")}
    items = [QUESTION, make_references(first)[0], sent_call, make_tool_result(first)]
    second = await client.responses.create(input=items, **PARAMS)
    assert second.output_text == "The answer is 7440."
    await check_continues(gateway, session)


async def test_calls_without_their_text_can_be_referenced(
    gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    items = [QUESTION, make_references(first)[1], make_tool_result(first)]
    await client.responses.create(input=items, **PARAMS)
    assert [call.link for call in await gateway.calls(session)] == [Link.ROOT, Link.EXTENDS]


def reply_with_reasoning(prompt: str, seed: int | None) -> str:
    calls = [
        f'<tool_call>{{"name": "calc", "arguments": {{"expression": "{i}"}}}}</tool_call>' for i in (1, 2)
    ]
    return "Done." if "<tool_response>" in prompt else "<think>\nHm.\n</think>\n\nSo.\n" + "\n".join(calls)


async def test_reasoning_and_parallel_calls_can_be_referenced(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    script = ScriptedEngineConfig(function="tests.unit.gateway.test_stored_responses:reply_with_reasoning")
    gateway = await start_gateway(ScriptedEngine(model, script))
    session = await gateway.open_session(channel="train")
    async with gateway.openai_client(session) as client:
        first = await client.responses.create(input=[QUESTION], **PARAMS)
        types = [item.type for item in first.output]
        assert types == ["reasoning", "message", "function_call", "function_call"]
        reasoning, text, one, two = make_references(first)
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
            for item in first.output[2:]
        ]
        items = [QUESTION, reasoning, text, one, results[0], two, results[1]]
        await client.responses.create(input=items, **PARAMS)
    calls = await gateway.calls(session)
    assert calls[1].messages[2] == calls[0].reply
    assert calls[1].link is Link.EXTENDS


async def test_live_call_with_item_references_stays_in_its_session(gateway: RunningGateway) -> None:
    key = await create_key(gateway.store, "agent", "agent")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key) as client:
        first = await client.responses.create(input=[QUESTION], **PARAMS)
        items = [QUESTION, *make_references(first), make_tool_result(first)]
        second = await client.responses.with_raw_response.create(input=items, **PARAMS)
    calls = await gateway.store.calls(second.headers["x-instar-session"])
    assert [call.link for call in calls] == [Link.ROOT, Link.EXTENDS]


@pytest.mark.parametrize(
    "item_id", ["msg_0123456789abcdef0123_0", "rs_68af", "x", "fc_RESPONSE_7", "msg_RESPONSE_in0"]
)
async def test_unknown_item_reference_is_rejected_with_its_path(
    client: openai.AsyncOpenAI, gateway: RunningGateway, session: OpenedSession, item_id: str
) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    item_id = item_id.replace("RESPONSE", first.id.removeprefix("resp-"))
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(input=[QUESTION, {"type": "item_reference", "id": item_id}], **PARAMS)
    assert (caught.value.param, caught.value.type) == ("input[1].id", "invalid_request_error")
    assert item_id in caught.value.message
    assert len(await gateway.calls(session)) == 1


async def test_token_count_includes_referenced_items(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    items = [QUESTION, *make_references(first), make_tool_result(first)]
    by_reference = await client.responses.input_tokens.count(input=items, **PARAMS)
    by_id = await client.responses.input_tokens.count(
        input=items[-1:], previous_response_id=first.id, **PARAMS
    )
    second = await client.responses.create(input=items, **PARAMS)
    assert second.usage is not None
    assert by_reference.input_tokens == by_id.input_tokens == second.usage.input_tokens


# --- other sessions and store: false ------------------------------------------------------------


async def test_other_sessions_cannot_reference_or_read_a_response(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    other = await gateway.open_session(channel="train")
    agent_key = await create_key(gateway.store, "agent", "agent")
    for key in (other.api_key, agent_key):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key) as stranger:
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.create(input=[QUESTION, *make_references(first)], **PARAMS)
            with pytest.raises(openai.BadRequestError) as caught:
                await stranger.responses.create(input="Hi", model="m", previous_response_id=first.id)
            assert caught.value.code == "previous_response_not_found"
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.input_items.list(first.id)


async def test_response_is_only_found_under_the_url_of_its_session(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    other = await gateway.open_session()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for suffix in ("", "/input_items"):
        path = f"/v1/responses/{first.id}{suffix}"
        assert (await gateway.http.get(path, headers=headers)).status_code == 200
        response = await gateway.http.get(f"/s/{other.session_id}{path}", headers=headers)
        assert response.status_code == 404


async def test_response_with_store_false_cannot_be_found_by_its_id(
    gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(input=[QUESTION], store=False, **PARAMS)
    assert first.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(input=[QUESTION, *make_references(first)], **PARAMS)
    assert "not stored" in caught.value.message
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(input="Hi", model="m", previous_response_id=first.id)
    items: list[Any] = [QUESTION, *first.output, make_tool_result(first)]
    await client.responses.create(input=items, store=False, **PARAMS)
    await check_continues(gateway, session)


async def test_unknown_response_is_not_found(client: openai.AsyncOpenAI, gateway: RunningGateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve("resp_unknown")
    assert (caught.value.param, caught.value.type) == (None, "invalid_request_error")
    chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(chat.id)


# --- stored responses ---------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "metadata": {"team": "x"},
    "max_output_tokens": 300,
    "parallel_tool_calls": False,
    "prompt_cache_key": "p",
    "reasoning": {"effort": "low"},
    "temperature": 0.5,
    "top_p": 0.9,
    "tool_choice": "auto",
    "user": "ada",
}


@pytest.mark.parametrize("stream", [False, True])
async def test_stored_response_equals_the_response_to_its_request(
    gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI, stream: bool
) -> None:
    if stream:
        async with client.responses.stream(input=[QUESTION], **PARAMS, **FIELDS) as events:
            first: Any = await events.get_final_response()
    else:
        first = await client.responses.create(input=[QUESTION], **PARAMS, **FIELDS)
    raw = await client.responses.with_raw_response.retrieve(first.id)
    validate(Response, raw.content)
    stored: dict[str, Any] = raw.parse().to_dict()
    expected: dict[str, Any] = Response.model_validate(first.to_dict()).to_dict()
    for name in ("created_at", "completed_at"):
        assert abs(stored.pop(name) - expected.pop(name)) <= 60
    for item in expected["output"]:  # The helper for streams adds this field.
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    assert stored == expected


async def test_truncated_response_is_stored_as_incomplete(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="m", input="long", max_output_tokens=5)
    stored = await client.responses.retrieve(first.id)
    assert (stored.status, stored.completed_at) == ("incomplete", None)
    assert stored.incomplete_details == first.incomplete_details


async def test_stored_response_of_an_ended_session_can_be_read(
    gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    await gateway.post_json(f"/sessions/{session.session_id}/complete", {})
    assert (await client.responses.retrieve(first.id)).output == first.output


async def test_input_items_are_listed_in_pages(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    second = await client.responses.create(
        input=[make_tool_result(first)], previous_response_id=first.id, **PARAMS
    )
    raw = await client.responses.input_items.with_raw_response.list(second.id, order="asc")
    validate(ResponseItemList, raw.content)
    items: list[Any] = raw.parse().data
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    assert items[0].content[0].text == QUESTION["content"]
    assert items[3].output == "7440"
    newest_first = [item async for item in client.responses.input_items.list(second.id, limit=1)]
    assert [item.id for item in newest_first] == [item.id for item in reversed(items)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "x"}, "after"),
    ],
)
async def test_invalid_page_of_input_items_is_rejected(
    gateway: RunningGateway, client: openai.AsyncOpenAI, query: dict[str, str], param: str
) -> None:
    first = await client.responses.create(input=[QUESTION], **PARAMS)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.input_items.list(first.id, extra_query=query)
    assert caught.value.param == param


async def test_custom_and_namespaced_tools_are_stored_under_the_names_of_the_client(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    script = ScriptedEngineConfig(function="tests.unit.gateway.test_stored_responses:reply_with_other_tools")
    gateway = await start_gateway(ScriptedEngine(model, script))
    session = await gateway.open_session(channel="train")
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [
        {"type": "custom", "name": "patch", "description": "Edit."},
        {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [spawn]},
    ]
    async with gateway.openai_client(session) as client:
        first: Any = await client.responses.create(model="m", input=[QUESTION], tools=tools)
        stored = await client.responses.retrieve(first.id)
        assert stored.output == first.output
        assert [item.type for item in stored.output] == ["custom_tool_call", "function_call"]
        results: list[Any] = [
            {"type": f"{item.type}_output", "call_id": item.call_id, "output": "ok"} for item in first.output
        ]
        second = await client.responses.create(
            model="m", input=[QUESTION, *make_references(first), *results], tools=tools
        )
        listed = await client.responses.input_items.list(second.id, order="asc")
    types = [item.type for item in listed.data]
    assert types == ["message", *[item.type for item in first.output], *[item["type"] for item in results]]
    await check_continues(gateway, session)


def reply_with_other_tools(prompt: str, seed: int | None) -> str:
    if "<tool_response>" in prompt:
        return "Done."
    calls = ('{"name": "patch", "arguments": {"input": "x"}}', '{"name": "agents__spawn", "arguments": {}}')
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)


async def test_secrets_are_not_in_stored_responses(
    gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI
) -> None:
    secret = "sk-" + "a1B2" * 8
    first = await client.responses.create(
        model="m", input=f"Say {secret}", instructions=f"Use {secret}.", metadata={"key": secret}
    )
    assert secret in first.output_text
    for read in (client.responses.retrieve, client.responses.input_items.list):
        stored: Any = await read(first.id)
        assert secret not in stored.to_json()
    assert (await client.responses.retrieve(first.id)).usage is None
    assert secret.encode() not in gateway.store_path.read_bytes()
