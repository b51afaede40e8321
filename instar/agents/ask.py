"""An agent that makes a single call and returns no reward."""

from __future__ import annotations

from typing import Any

from instar.agents.openai_agent import OpenAIAgent, make_turns
from instar.rollout.base import AgentSession
from instar.types import Json


class SingleCallAgent(OpenAIAgent):
    """An agent that sends the ``system`` prompt, ``examples`` as (question, answer) pairs, and the task's
    `messages`, `question` or `prompt`. The model may call the task's `tools`."""

    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        system: str = "",
        examples: list[tuple[str, str]] | None = None,
        max_tokens: int = 128,
    ) -> None:
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        for question, answer in examples or []:
            messages += make_turns(question, answer)
        match task:
            case {"messages": list() as task_messages}:
                messages += task_messages
            case {"question": str() as text} | {"prompt": str() as text}:
                messages += make_turns(text)
            case _:
                raise ValueError("the task must have a list 'messages', or a string 'question' or 'prompt'")
        tools = {"tools": task["tools"]} if task.get("tools") else {}
        await self.complete(session, messages, max_tokens=max_tokens, **tools)


ask = SingleCallAgent()
