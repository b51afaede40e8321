"""Three agents for GSM8K: `solve` writes calculations in plain text, `solve_in_one_turn` writes only one, and
`solve_with_tools` calls tools to calculate and to check its answer."""

from __future__ import annotations

import json
from typing import Any

from instar.agents.calculator import CALC_TOOL, calculate
from instar.agents.openai_agent import OpenAIAgent, make_tool, make_tool_call, make_tool_result, make_turns
from instar.rollout.base import AgentSession
from instar.rollout.tasksets.gsm8k import ANSWER_MARKER, find_final_number
from instar.types import Json

MAX_TURNS = 4
MAX_TEXT_TOKENS, MAX_CALL_TOKENS = 24, 48
EXAMPLES = (
    ("Tom picks 15 bags of 20 plums and eats 31. How many plums remain?", "15 * 20 - 31", "269"),
    ("A crate holds 24 bottles. How many bottles are in 310 crates?", "24 * 310", "7440"),
    ("Mia has 615 nuts and picks 278 more. How many nuts does Mia have?", "615 + 278", "893"),
    ("Ruth has 350 cups and Max has 129. How many more cups does Ruth have than Max?", "350 - 129", "221"),
    ("Sam shares 96 nuts among 8 friends. How many nuts does each get?", "96 / 8", "12"),
)
CHECK_TOOL = make_tool("check_answer", "Check the final number.", "answer")
CORRECT, WRONG = "correct", "wrong, try again"


class Gsm8kTextAgent(OpenAIAgent):
    """An agent that writes a calculation, receives the result and then writes the answer."""

    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        examples: int = len(EXAMPLES),
        max_tokens: int = MAX_TEXT_TOKENS,
    ) -> None:
        prompt = "Write the calculation, then the answer behind ####."
        messages: list[Any] = [{"role": "system", "content": prompt}]
        for question, expression, answer in EXAMPLES[:examples]:
            messages += make_turns(question, expression, f"= {answer}", f"{ANSWER_MARKER} {answer}")
        messages += make_turns(task["question"])
        for _ in range(MAX_TURNS):
            text = (await self.complete(session, messages, max_tokens=max_tokens)).content or ""
            if ANSWER_MARKER in text:
                return
            result = calculate(json.dumps({"expression": text.rstrip("= ")}))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"= {result}"}]


class Gsm8kSingleTurnAgent(OpenAIAgent):
    """An agent that writes one calculation. It returns the reward, which is 1 if the result is correct."""

    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        examples: int = len(EXAMPLES),
        max_tokens: int = MAX_TEXT_TOKENS,
    ) -> float:
        messages: list[Any] = [{"role": "system", "content": "Write the calculation."}]
        for question, expression, _ in EXAMPLES[:examples]:
            messages += make_turns(question, expression)
        messages += make_turns(task["question"])
        text = (await self.complete(session, messages, max_tokens=max_tokens)).content or ""
        result = calculate(json.dumps({"expression": text.rstrip("= ")}))
        return float(_is_correct(result, task["final"]))


class Gsm8kToolAgent(OpenAIAgent):
    """An agent that calculates, checks its answer, and tries again if it is wrong. It returns the number of
    turns and the reward: 1 if the first check succeeds, halved by every failed check, 0 without success."""

    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        examples: int = len(EXAMPLES),
        max_tokens: int = MAX_CALL_TOKENS,
    ) -> tuple[int, float]:
        messages: list[Any] = [{"role": "system", "content": "Call the calc tool, then check_answer."}]
        for number, (question, expression, answer) in enumerate(EXAMPLES[:examples]):
            messages += [
                *make_turns(question),
                make_tool_call(f"calc_{number}", "calc", expression=expression),
                make_tool_result(f"calc_{number}", answer),
                make_tool_call(f"check_{number}", "check_answer", answer=answer),
                make_tool_result(f"check_{number}", CORRECT),
            ]
        messages += make_turns(task["question"])
        failed_checks = 0
        for turn in range(1, MAX_TURNS + 1):
            reply = await self.complete(
                session, messages, tools=[CALC_TOOL, CHECK_TOOL], max_tokens=max_tokens
            )
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return turn, 0.0
            for call in reply.tool_calls:
                if call.type == "function" and call.function.name == "check_answer":
                    result = check_answer(call.function.arguments, task["final"])
                    if result == CORRECT:
                        return turn, 0.5**failed_checks
                    failed_checks += 1
                else:
                    result = calculate(call.function.arguments if call.type == "function" else "")
                messages.append(make_tool_result(call.id, result))
        return MAX_TURNS, 0.0


solve = Gsm8kTextAgent()
solve_in_one_turn = Gsm8kSingleTurnAgent()
solve_with_tools = Gsm8kToolAgent()


def check_answer(arguments: str, expected: str) -> str:
    """Return the result of the `check_answer` tool for the JSON ``arguments``: whether the answer equals
    ``expected``, or `error` if the arguments are invalid."""
    try:
        answer = str(json.loads(arguments)["answer"])
    except (ValueError, TypeError, KeyError):
        return "error"
    return CORRECT if _is_correct(answer, expected) else WRONG


def _is_correct(answer: str, expected: str) -> bool:
    number = find_final_number(answer)
    return number is not None and abs(number - float(expected)) < 1e-6
