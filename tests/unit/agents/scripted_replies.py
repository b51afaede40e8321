"""Functions for the scripted engine that reply to the agents depending on the prompt."""

from __future__ import annotations

import json
import re

MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
OPERATIONS = (
    ("shared", "{}/{}"),
    ("packs", "{}*{}-{}"),
    ("Monday", "{}+{}+{}"),
    ("finds", "{}+{}"),
    ("sells|than", "{}-{}"),
    ("box", "{}*{}"),
)


def parse_messages(prompt: str) -> list[tuple[str, str]]:
    """Return the role and text of each message; tool results have the role `tool`."""
    return [
        ("tool" if "<tool_response>" in text else role, text.strip())
        for role, text in MESSAGE.findall(prompt)
    ]


def call(tool: str, **arguments: str | int) -> str:
    return f'<tool_call>{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def expression(question: str) -> str:
    form = next(form for words, form in OPERATIONS if re.search(words, question))
    return form.format(*re.findall(r"\d+", question))


def solver(prompt: str, seed: int | None) -> str:
    role, text = parse_messages(prompt)[-1]
    return numbers(text)[-1] if role == "tool" else call("calc", expression=expression(text))


def writer(prompt: str, seed: int | None) -> str:
    """Write the calculation, then answer with its result."""
    text = parse_messages(prompt)[-1][1]
    return f"#### {text.removeprefix('= ')}" if text.startswith("= ") else expression(text)


def checker(prompt: str, seed: int | None) -> str:
    """Check the calculated number with the tool."""
    role, text = parse_messages(prompt)[-1]
    if role == "tool":
        return call("check_answer", answer=numbers(text)[-1])
    return call("calc", expression=expression(text))


def doubter(prompt: str, seed: int | None) -> str:
    """Check a wrong number first."""
    role, text = parse_messages(prompt)[-1]
    if role != "tool":
        return call("calc", expression=expression(text))
    if "wrong" in text:
        return call("check_answer", answer=numbers(parse_messages(prompt)[-3][1])[-1])
    return call("check_answer", answer="0")


def no_answer(prompt: str, seed: int | None) -> str:
    return "no idea"


def numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+", text)


# --- games --------------------------------------------------------------------------------------


def guesser(prompt: str, seed: int | None) -> str:
    """Guess by bisection."""
    low, high, last = 1, 20, 0
    for role, text in parse_messages(prompt):
        if role == "assistant":
            last = int(numbers(text)[0])
        elif "number is higher" in text:
            low = last + 1
        elif "number is lower" in text:
            high = last - 1
    return f"[{(low + high) // 2}]"


def poker(prompt: str, seed: int | None) -> str:
    """Neither bet nor fold."""
    observation = parse_messages(prompt)[-1][1]
    return "[call]" if "'[call]'" in observation.splitlines()[-1] else "[check]"


# --- function calls -----------------------------------------------------------------------------


def triangle(prompt: str, seed: int | None) -> str:
    """Return the call that solves the first task."""
    return call("calculate_triangle_area", base=10, height=5)


def wrong_triangle(prompt: str, seed: int | None) -> str:
    return call("calculate_triangle_area", base=10, height=6)
