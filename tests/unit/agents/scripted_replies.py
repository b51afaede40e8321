"""Reply functions for the scripted engine, which stands in for the model in agent tests."""

from __future__ import annotations

import json
import re

MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
EXPRESSION_TEMPLATES = (
    ("shared", "{}/{}"),
    ("packs", "{}*{}-{}"),
    ("Monday", "{}+{}+{}"),
    ("finds", "{}+{}"),
    ("sells|than", "{}-{}"),
    ("box", "{}*{}"),
)


def parse_messages(prompt: str) -> list[tuple[str, str]]:
    """Return the role and text of each message. Tool results have the role `tool`."""
    return [
        ("tool" if "<tool_response>" in text else role, text.strip())
        for role, text in MESSAGE.findall(prompt)
    ]


def format_tool_call(tool: str, **arguments: str | int) -> str:
    return f'<tool_call>{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def make_expression(question: str) -> str:
    template = next(template for pattern, template in EXPRESSION_TEMPLATES if re.search(pattern, question))
    return template.format(*re.findall(r"\d+", question))


def solve_with_calculator(prompt: str, seed: int | None) -> str:
    """Call calc, then answer with its result."""
    role, text = parse_messages(prompt)[-1]
    return (
        find_numbers(text)[-1]
        if role == "tool"
        else format_tool_call("calc", expression=make_expression(text))
    )


def write_calculation(prompt: str, seed: int | None) -> str:
    """Write the calculation as text, then answer with the result from the next message."""
    text = parse_messages(prompt)[-1][1]
    return f"#### {text.removeprefix('= ')}" if text.startswith("= ") else make_expression(text)


def check_calculated_answer(prompt: str, seed: int | None) -> str:
    """Call calc, then check_answer with its result."""
    role, text = parse_messages(prompt)[-1]
    if role == "tool":
        return format_tool_call("check_answer", answer=find_numbers(text)[-1])
    return format_tool_call("calc", expression=make_expression(text))


def check_wrong_answer_first(prompt: str, seed: int | None) -> str:
    """Call calc, then check_answer with a wrong number, then check_answer with the result of calc."""
    role, text = parse_messages(prompt)[-1]
    if role != "tool":
        return format_tool_call("calc", expression=make_expression(text))
    if "wrong" in text:
        return format_tool_call("check_answer", answer=find_numbers(parse_messages(prompt)[-3][1])[-1])
    return format_tool_call("check_answer", answer="0")


def reply_without_answer(prompt: str, seed: int | None) -> str:
    return "no idea"


def find_numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+", text)


# --- games --------------------------------------------------------------------------------------


def guess_by_bisection(prompt: str, seed: int | None) -> str:
    """Guess the middle of the range that the previous hints allow."""
    low, high, last_guess = 1, 20, 0
    for role, text in parse_messages(prompt):
        if role == "assistant":
            last_guess = int(find_numbers(text)[0])
        elif "number is higher" in text:
            low = last_guess + 1
        elif "number is lower" in text:
            high = last_guess - 1
    return f"[{(low + high) // 2}]"


def play_poker(prompt: str, seed: int | None) -> str:
    """Call if possible, otherwise check. Never bet or fold."""
    observation = parse_messages(prompt)[-1][1]
    return "[call]" if "'[call]'" in observation.splitlines()[-1] else "[check]"


# --- function calls -----------------------------------------------------------------------------


def call_triangle_area(prompt: str, seed: int | None) -> str:
    """Return the call that solves the first BFCL task."""
    return format_tool_call("calculate_triangle_area", base=10, height=5)


def call_triangle_area_with_wrong_height(prompt: str, seed: int | None) -> str:
    return format_tool_call("calculate_triangle_area", base=10, height=6)
