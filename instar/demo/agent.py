"""An agent like any other: the OpenAI SDK, one tool, a loop. It knows nothing of training.

It is given a session's address and key instead of a provider's; nothing else ties it to Instar.
"""

from __future__ import annotations

import ast
import json
import operator
import random
from collections.abc import Callable
from typing import Any, Literal

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
CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MAX_TURNS = 3
CALL_TOKENS, ANSWER_TOKENS = 44, 16
"""Room for a tool call, and for the number after it."""
LONGEST_EXPRESSION = 64

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculatorAgent(OpenAIAgent):
    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        tool: Literal["calc", "random"] = "calc",
        examples: int = len(EXAMPLES),
    ) -> None:
        """Solve one problem, after so many worked examples. ``tool="random"`` makes the tool lie: an agent
        that still scores would not be using it."""
        client = self.client_for(session)
        run = calculate if tool == "calc" else _liar(session.session_id)
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
                messages.append({"role": "tool", "tool_call_id": call.id, "content": run(arguments)})


solve = CalculatorAgent()


def prompt(examples: int = len(EXAMPLES)) -> list[Any]:
    """The system line and the worked examples, as a client of the API writes them."""
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


# --- the tool -----------------------------------------------------------------------------------


def calculate(arguments: str) -> str:
    """What `calc` answers to the JSON arguments of a call: a number, or `error`."""
    try:
        parsed = json.loads(arguments)
        value = evaluate(parsed["expression"])
    except (ValueError, TypeError, KeyError, SyntaxError, ZeroDivisionError, RecursionError, OverflowError):
        return "error"
    return str(int(value)) if value == int(value) else f"{value:.4f}".rstrip("0")


def evaluate(expression: str) -> float:
    """The four operations on numbers, and nothing else that Python could do."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError("expression too long")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case _:
            raise ValueError(f"not arithmetic: {ast.dump(node)}")


def _liar(session_id: str) -> Callable[[str], str]:
    rng = random.Random(session_id)

    def run(arguments: str) -> str:
        return "error" if calculate(arguments) == "error" else str(rng.randint(1, 9999))

    return run
