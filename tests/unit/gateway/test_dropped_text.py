"""Agents that drop the text beside a tool call from the next request, as agno and CrewAI do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instar.config import ModelConfig
from instar.record.base import Renderer
from instar.types import Link
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway
from tests.unit.gateway.wire import get_session_id, post, run_scripted_gateway

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
QUESTION = {"role": "user", "content": "What is 24 * 310?"}
Messages = list[dict[str, Any]]


def continue_chat(reply: dict[str, Any]) -> Messages:
    message = reply["choices"][0]["message"]
    assert message["content"].strip() == "Let me see."
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7440"}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, result]


def continue_responses(reply: dict[str, Any]) -> Messages:
    message, call = reply["output"]
    assert message["content"][0]["text"].strip() == "Let me see."
    return [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "7440"}]


def continue_messages(reply: dict[str, Any]) -> Messages:
    text, call = reply["content"]
    assert text["text"].strip() == "Let me see."
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "7440"}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


CASES: list[Any] = [
    pytest.param(
        "chat",
        "messages",
        {"type": "function", "function": {"name": "calc", "parameters": SCHEMA}},
        continue_chat,
        id="chat",
    ),
    pytest.param(
        "responses",
        "input",
        {"type": "function", "name": "calc", "parameters": SCHEMA},
        continue_responses,
        id="responses",
    ),
    pytest.param(
        "messages", "messages", {"name": "calc", "input_schema": SCHEMA}, continue_messages, id="messages"
    ),
]


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "restart"])
@pytest.mark.parametrize(("dialect", "field", "tool", "continue_reply"), CASES)
async def test_call_after_dropped_text_continues_the_recorded_tokens(
    tmp_path: Path,
    model: ModelConfig,
    renderer: Renderer,
    dialect: str,
    field: str,
    tool: dict[str, Any],
    continue_reply: Callable[[dict[str, Any]], Messages],
    is_live: bool,
) -> None:
    """A live agent's session is recognized by its content, an opened session also after a restart."""
    messages: Messages = [QUESTION]

    async def send(gateway: RunningGateway, key: str) -> Any:
        body = {"model": "m", "tools": [tool], field: messages}
        body |= {"max_tokens": 200} if dialect == "messages" else {}
        return await post(gateway, body, dialect, key)

    async with run_scripted_gateway(tmp_path / "store.db", model, renderer) as gateway:
        key = ADMIN_KEY if is_live else (await gateway.open_session()).api_key
        first = await send(gateway, key)
        messages += continue_reply(first.json())
        second = await send(gateway, key) if is_live else None
    async with run_scripted_gateway(tmp_path / "store.db", model, renderer) as gateway:
        second = second or await send(gateway, key)
        assert "The answer is 7440." in second.text
        assert get_session_id(second) == get_session_id(first)
        calls = await gateway.store.calls(get_session_id(first))
    assert [call.link for call in calls] == [Link.ROOT, Link.EXTENDS]
    sequence = calls[0].sequence.tolist()
    assert calls[1].prompt_ids[: len(sequence)].tolist() == sequence
    assert calls[1].trainable
