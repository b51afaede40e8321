"""Agents of a single call: they ask, and whatever is answered is scored by someone else."""

from __future__ import annotations

from typing import Any

from instar.agents.openai_agent import OpenAIAgent
from instar.rollout.base import AgentSession
from instar.types import Json


class SingleCallAgent(OpenAIAgent):
    """Asks what the task says: its `messages`, or else its `question`, or its `prompt`, behind a system line;
    with the task's `tools`, where it has some."""

    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        system: str = "",
        examples: list[tuple[str, str]] | None = None,
        max_tokens: int = 128,
    ) -> None:
        """``examples`` are questions with their answers, shown first."""
        client = self.client_for(session)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        for question, answer in examples or []:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages += _asked(task)
        tools: dict[str, Any] = {"tools": task["tools"]} if task.get("tools") else {}
        await client.chat.completions.create(
            model=session.model, messages=messages, max_tokens=max_tokens, **tools
        )


ask = SingleCallAgent()


def _asked(task: Json) -> list[Any]:
    match task:
        case {"messages": list() as messages}:
            return messages
        case {"question": str() as text} | {"prompt": str() as text}:
            return [{"role": "user", "content": text}]
        case _:
            raise ValueError("the task has neither messages nor a question nor a prompt")
