"""Prompts that do not fit into the context, with `gateway.overflow`."""

from __future__ import annotations

from typing import Any

import pytest

from instar.config import GatewayConfig
from instar.gateway.pipeline.place import list_droppable_turns
from instar.types import Link
from tests.unit.gateway.conftest import RunningGateway, StartGateway
from tests.unit.gateway.wire import build_request, get_session_id, post

TEXT = "word " * 40  # about 100 tokens; the context has 1024
HEADER = "x-instar-dropped-messages"
TURNS = [text for i in range(12) for text in (f"{i} {TEXT}", f"reply {i}")]


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> RunningGateway:
    return await start_gateway(config=GatewayConfig(overflow="truncate"))


async def test_prompt_that_does_not_fit_is_rejected_by_default(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    response = await post(gateway, build_request("chat", *TURNS, "go on"))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_oldest_turns_are_dropped_until_the_prompt_and_the_reply_fit(
    gateway: RunningGateway, dialect: str, stream: bool
) -> None:
    session = await gateway.open_session(channel="train")
    first = await post(gateway, build_request(dialect, "hello"), dialect, session.api_key)
    assert HEADER not in first.headers
    field = "max_output_tokens" if dialect == "responses" else "max_tokens"
    body = build_request(dialect, *TURNS, "go on", stream=stream) | {field: 300}
    response = await post(gateway, body, dialect, session.api_key)
    assert response.status_code == 200, response.text
    dropped = int(response.headers[HEADER])
    assert 0 < dropped < len(TURNS)
    call = (await gateway.calls(session))[1]
    assert [message["content"] for message in call.messages] == [*TURNS[dropped:], "go on"]
    assert len(call.prompt_ids) <= 1024 - 300
    assert (call.link, call.trainable) == (Link.BRANCH, True)
    more = await post(gateway, body | {field: 1}, dialect, session.api_key)
    assert int(more.headers[HEADER]) < dropped, "more turns were dropped than necessary"


async def test_system_messages_stay_and_calls_are_dropped_with_their_results(gateway: RunningGateway) -> None:
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": f"old {TEXT}"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "the task"},
    ]
    for i in range(12):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": f"{i} {TEXT}"},
        ]
    response = await post(gateway, {"model": "m", "messages": messages, "tools": [tool], "max_tokens": 200})
    (call,) = await gateway.store.calls(get_session_id(response))
    contents = [message["content"] for message in call.messages]
    assert contents[:2] == ["Rules.", "the task"]
    assert contents[-1] == messages[-1]["content"]
    calls = [c["id"] for message in call.messages for c in message.get("tool_calls", ())]
    results = [message["tool_call_id"] for message in call.messages if "tool_call_id" in message]
    assert calls == results == [f"c{i}" for i in range(12 - len(calls), 12)]
    assert int(response.headers[HEADER]) == len(messages) - len(contents)


async def test_newest_user_message_that_does_not_fit_is_rejected(gateway: RunningGateway) -> None:
    response = await post(gateway, build_request("chat", "hi", "hello", TEXT * 20))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_droppable_turns_keep_the_results_with_their_calls() -> None:
    roles = ["system", "user", "assistant", "tool", "user", "tool", "assistant", "tool", "system"]
    messages: Any = [{"role": role, "content": ""} for role in roles]
    messages[2]["tool_calls"] = [{"id": "a"}, {"id": "b"}]
    messages[3]["tool_call_id"], messages[5]["tool_call_id"] = "a", "b"
    assert list_droppable_turns(messages) == [[1, 2, 3, 5]]
