"""The demo's agent: the OpenAI SDK, one tool and a loop. From Instar, it needs only a base URL and a key."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

from instar.agents.calculator import CALC_TOOL, calculate
from instar.agents.openai_agent import OpenAIAgent, make_tool_call, make_tool_result, make_turns
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
MAX_CALL_TOKENS, MAX_ANSWER_TOKENS = 44, 16


class CalculatorAgent(OpenAIAgent):
    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        tool: Literal["calc", "random"] = "calc",
        examples: int = len(EXAMPLES),
    ) -> None:
        """Solve one problem after ``examples`` worked examples. The tool "random" returns random numbers, to
        show that the problems cannot be solved without the calculator."""
        run_tool = calculate if tool == "calc" else _make_random_tool(session.session_id)
        messages: list[Any] = [*make_prompt(examples), *make_turns(task["question"])]
        for turn in range(MAX_TURNS):
            max_tokens = MAX_ANSWER_TOKENS if turn else MAX_CALL_TOKENS
            reply = await self.complete(session, messages, tools=[CALC_TOOL], max_tokens=max_tokens)
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return
            for call in reply.tool_calls:
                arguments = call.function.arguments if call.type == "function" else ""
                messages.append(make_tool_result(call.id, run_tool(arguments)))


solve = CalculatorAgent()


def make_prompt(examples: int = len(EXAMPLES)) -> list[Any]:
    """Return the system message and the worked examples as chat messages."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for number, (question, expression, answer) in enumerate(EXAMPLES[:examples]):
        messages += [
            *make_turns(question),
            make_tool_call(f"call_{number}", "calc", expression=expression),
            make_tool_result(f"call_{number}", answer),
            {"role": "assistant", "content": answer},
        ]
    return messages


def _make_random_tool(session_id: str) -> Callable[[str], str]:
    rng = random.Random(session_id)

    def run(arguments: str) -> str:
        return "error" if calculate(arguments) == "error" else str(rng.randint(1, 9999))

    return run
