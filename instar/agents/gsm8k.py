"""Two agents for GSM8K. `solve` writes calculations in plain text and returns no reward. `check` has two
tools, one that calculates and one that checks an answer. It takes several turns and returns
``(turns, reward)``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from instar.agents.calculator import CALC, calculate
from instar.agents.openai_agent import OpenAIAgent
from instar.rollout.base import AgentSession
from instar.rollout.tasksets.gsm8k import MARK, final_number
from instar.types import Json

MAX_TURNS = 4
TEXT_TOKENS, CALL_TOKENS = 24, 48
"""The token limits of a calculation in plain text and of a calculation in a tool call."""
EXAMPLES = (
    ("Tom picks 15 bags of 20 plums and eats 31. How many plums remain?", "15 * 20 - 31", "269"),
    ("A crate holds 24 bottles. How many bottles are in 310 crates?", "24 * 310", "7440"),
    ("Mia has 615 nuts and picks 278 more. How many nuts does Mia have?", "615 + 278", "893"),
    ("Ruth has 350 cups and Max has 129. How many more cups does Ruth have than Max?", "350 - 129", "221"),
    ("Sam shares 96 nuts among 8 friends. How many nuts does each get?", "96 / 8", "12"),
)
CHECK: Any = {
    "type": "function",
    "function": {
        "name": "check_answer",
        "description": "Check the final number.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string"}},
            "required": ["answer"],
        },
    },
}
CORRECT, WRONG = "correct", "wrong, try again"


class Gsm8kTextAgent(OpenAIAgent):
    """An agent that writes a calculation, gets its result and answers, after some worked examples."""

    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        examples: int = len(EXAMPLES),
        max_tokens: int = TEXT_TOKENS,
    ) -> None:
        client = self.client_for(session)
        messages: list[Any] = [
            *_text_examples(EXAMPLES[:examples]),
            {"role": "user", "content": task["question"]},
        ]
        for _ in range(MAX_TURNS):
            response = await client.chat.completions.create(
                model=session.model, messages=messages, max_tokens=max_tokens
            )
            text = response.choices[0].message.content or ""
            if MARK in text:
                return
            result = calculate(json.dumps({"expression": text.rstrip("= ")}))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"= {result}"}]


class Gsm8kToolAgent(OpenAIAgent):
    """An agent that calculates, has its answer checked, and tries again if the answer is wrong. The reward is
    1 if the first check succeeds, and halves with every additional check."""

    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        examples: int = len(EXAMPLES),
        max_tokens: int = CALL_TOKENS,
    ) -> tuple[int, float]:
        client = self.client_for(session)
        messages: list[Any] = [
            *_tool_examples(EXAMPLES[:examples]),
            {"role": "user", "content": task["question"]},
        ]
        checks = 0
        for turn in range(1, MAX_TURNS + 1):
            response = await client.chat.completions.create(
                model=session.model, messages=messages, tools=[CALC, CHECK], max_tokens=max_tokens
            )
            reply = response.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return turn, 0.0
            for call in reply.tool_calls:
                if call.type == "function" and call.function.name == "check_answer":
                    result = check_answer(call.function.arguments, task["final"])
                    if result == CORRECT:
                        return turn, 0.5**checks
                    checks += 1
                else:
                    result = calculate(call.function.arguments if call.type == "function" else "")
                messages.append(_tool_result(call.id, result))
        return MAX_TURNS, 0.0


solve = Gsm8kTextAgent()
check = Gsm8kToolAgent()


def check_answer(arguments: str, final: str) -> str:
    """Return the result of a call of the checking tool with these JSON arguments."""
    try:
        number = final_number(str(json.loads(arguments)["answer"]))
    except (ValueError, TypeError, KeyError):
        return "error"
    return CORRECT if number is not None and abs(number - float(final)) < 1e-6 else WRONG


def _text_examples(examples: Sequence[tuple[str, str, str]]) -> list[Any]:
    messages: list[Any] = [
        {"role": "system", "content": "Write the calculation, then the answer behind ####."}
    ]
    for question, expression, answer in examples:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": expression},
            {"role": "user", "content": f"= {answer}"},
            {"role": "assistant", "content": f"{MARK} {answer}"},
        ]
    return messages


def _tool_examples(examples: Sequence[tuple[str, str, str]]) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "Call the calc tool, then check_answer."}]
    for number, (question, expression, answer) in enumerate(examples):
        messages += [
            {"role": "user", "content": question},
            _tool_call(f"calc_{number}", "calc", expression=expression),
            _tool_result(f"calc_{number}", answer),
            _tool_call(f"check_{number}", "check_answer", answer=answer),
            _tool_result(f"check_{number}", CORRECT),
        ]
    return messages


def _tool_call(call_id: str, name: str, **arguments: str) -> Any:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _tool_result(call_id: str, content: str) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": content}
