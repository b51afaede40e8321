"""The tasks, agent, replies and reward rule of crash tests, all deterministic for a given seed."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from instar.config import PluginConfig
from instar.rewards.base import Scorer, Transcript
from instar.rollout.base import AgentSession
from instar.types import Reward, RewardSource, Task

ADD_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"n": {"type": "string"}}},
    },
}


def make_reply(prompt: str, seed: int | None) -> str:
    """Return a tool call or, if the prompt has a tool result, that result plus a number from 0 to 2."""
    results = re.findall(r"result=(\d+)", prompt)
    offset = blake2b(f"{seed}/{len(prompt)}".encode(), digest_size=1).digest()[0] % 3
    if not results:
        return f'<tool_call>{{"name": "add", "arguments": {{"n": "{offset}"}}}}</tool_call>'
    return str(int(results[-1]) + offset)


def make_tasks(count: int = 64) -> list[dict[str, Any]]:
    return [{"number": number} for number in range(count)]


def score_answer(task: dict[str, Any], transcript: Transcript) -> float:
    """Return 1 for the task's number, 0.5 for the next number and 0 for others, so that rewards differ within
    a group."""
    return {0: 1.0, 1: 0.5}.get(int(transcript.final_text) - int(task["number"]), 0.0)


class BackgroundRule(Scorer):
    """Applies `score_answer` in the rewards role."""

    name = "rule"
    background = True

    def __init__(self, config: PluginConfig) -> None:
        del config  # this scorer has no settings

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        value = score_answer(task.data, transcript)
        return [Reward(transcript.session_id, value, RewardSource.RULE, scorer=self.name)]


async def agent(task: dict[str, Any], session: AgentSession, *, ledger: str) -> None:
    """Take two turns, the second one streamed, and append the id of each complete reply to a ledger file."""
    # Retry often, because the gateway may be killed again while it restarts.
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=60, max_retries=10)
    messages: list[Any] = [{"role": "user", "content": f"say {task['number']}"}]
    async with client:
        first = await client.chat.completions.create(model="m", messages=messages, tools=[ADD_TOOL])
        append_reply_id(ledger, first.id)
        message = first.choices[0].message
        assert message.tool_calls, f"no tool call in {message.content!r}"
        messages.append(message.model_dump(exclude_none=True))
        tool_message = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": f"result={task['number']}",
        }
        messages.append(tool_message)
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=[ADD_TOOL], stream=True
        )
        async for chunk in cast(AsyncIterator[ChatCompletionChunk], stream):
            if chunk.choices and chunk.choices[0].finish_reason is not None:
                append_reply_id(ledger, chunk.id)


def append_reply_id(ledger: str, reply_id: str) -> None:
    """Append the id and sync it to disk, so that it is kept if the process is killed."""
    with Path(ledger).open("a") as file:
        file.write(f"{reply_id}\n")
        file.flush()
        os.fsync(file.fileno())
