"""The demo's agent: the OpenAI SDK, one tool, and a loop. It does not depend on training.

The agent gets the URL and key of a session instead of a provider's; nothing else connects it to Instar.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Literal

from instar.agents.calculator import CALC, calculate
from instar.agents.openai_agent import OpenAIAgent
from instar.rollout.base import AgentSession
from instar.types import Json

SYSTEM = "Call the calc tool, then answer with the number."
EXAMPLES = (
    ("A crate holds 24 bottles. How many bottles are in 310 crates?", "24 * 310", "7440"),
    ("What is 615 plus 278?", "615 + 278", "893"),
    ("Ruth has 350 cups and Max has 129. How many more cups does Ruth have than Max?", "350 - 129", "221"),
    ("Sam shares 96 nuts among 8 friends. How many nuts does each get?", "96 / 8", "12"),
)
MAX_TURNS = 3
CALL_TOKENS, ANSWER_TOKENS = 44, 16
"""The token limits of a tool call and of the number after it."""


class CalculatorAgent(OpenAIAgent):
    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        tool: Literal["calc", "random"] = "calc",
        examples: int = len(EXAMPLES),
    ) -> None:
        """Solve one problem after ``examples`` worked examples. With ``tool="random"`` the tool returns
        random numbers; an agent that still gets rewards does not use the tool."""
        client = self.client_for(session)
        run_tool = calculate if tool == "calc" else _random_tool(session.session_id)
        messages: list[Any] = [*prompt(examples), {"role": "user", "content": task["question"]}]
        for turn in range(MAX_TURNS):
            response = await client.chat.completions.create(
                model=session.model,
                messages=messages,
                tools=[CALC],
                max_tokens=ANSWER_TOKENS if turn else CALL_TOKENS,
            )
            reply = response.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return
            for call in reply.tool_calls:
                arguments = call.function.arguments if call.type == "function" else ""
                messages.append({"role": "tool", "tool_call_id": call.id, "content": run_tool(arguments)})


solve = CalculatorAgent()


def prompt(examples: int = len(EXAMPLES)) -> list[Any]:
    """Return the system message and the worked examples as messages of the chat API."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for number, (question, expression, answer) in enumerate(EXAMPLES[:examples]):
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "calc", "arguments": json.dumps({"expression": expression})},
        }
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": answer},
            {"role": "assistant", "content": answer},
        ]
    return messages


def _random_tool(session_id: str) -> Callable[[str], str]:
    rng = random.Random(session_id)

    def run(arguments: str) -> str:
        return "error" if calculate(arguments) == "error" else str(rng.randint(1, 9999))

    return run
