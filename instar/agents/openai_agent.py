"""The base class for agents that use the OpenAI SDK, and helpers that build messages and tool definitions."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from instar.rollout.base import AgentSession


class OpenAIAgent:
    """An agent whose sessions share a connection pool, because creating a client is slow."""

    def __init__(self) -> None:
        self._shared_client: AsyncOpenAI | None = None

    def client_for(self, session: AgentSession) -> AsyncOpenAI:
        if self._shared_client is None:
            self._shared_client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        return self._shared_client.with_options(base_url=session.base_url, api_key=session.api_key)

    async def complete(
        self, session: AgentSession, messages: list[Any], **options: Any
    ) -> ChatCompletionMessage:
        client = self.client_for(session)
        response: ChatCompletion = await client.chat.completions.create(
            model=session.model, messages=messages, **options
        )
        return response.choices[0].message

    async def aclose(self) -> None:
        if self._shared_client is not None:
            await self._shared_client.close()
            self._shared_client = None


def make_turns(*texts: str) -> list[Any]:
    """Return the texts as messages of the user and the assistant in turn, the user's first."""
    return [
        {"role": role, "content": text}
        for role, text in zip(cycle(("user", "assistant")), texts, strict=False)
    ]


def make_tool_call(call_id: str, name: str, **arguments: str) -> Any:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def make_tool_result(call_id: str, content: str) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def make_tool(name: str, description: str, parameter: str) -> Any:
    """Return the definition of a tool with one string parameter."""
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
