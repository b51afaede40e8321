"""An agent that sends one streamed request. The reward is the fraction of letters in the reply."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from instar.rollout.base import AgentSession
from tests.torture.workload import append_reply_id


def list_tasks(count: int = 64) -> list[dict[str, Any]]:
    return [{"number": number} for number in range(count)]


async def run_agent(task: dict[str, Any], session: AgentSession, *, ledger: str, max_tokens: int) -> float:
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=300) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": f"Repeat the number {task['number']}."}],
            max_tokens=max_tokens,
            stream=True,
        )
        text = ""
        completion_id = ""
        async for chunk in stream:
            completion_id = chunk.id
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    append_reply_id(ledger, completion_id)
    return sum(character.isalpha() for character in text) / max(1, len(text))
