"""Replies for the scripted engine, one function per model family, to the questions that the clients ask.

What is next follows from the prompt alone: the last question in it, and what tools have said since. A
question ends with how it is to be answered, for clients have tools of their own to do it with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

QUESTION_PATTERN = re.compile(r"Work out (\d+) \* (\d+) \+ (\d+) (\w+)\.")
TOOL_RESULT_PATTERN = re.compile(r"calc says (\d+)")
THANKS = "Thank you."
WELCOME = "You are welcome."
THINKING = "<think>\nLet me think.\n</think>\n\n"
MALFORMED = "I call <tool_call>{'name': calc}</tool_call>"

WriteCall = Callable[[str, dict[str, object]], str]


def make_question(number: int, style: str = "stepwise") -> str:
    """``how``: stepwise, helped, typed, finally, coded, bashed, fenced, plainly or badly."""
    return f"Work out {number} * 310 + 5 {style}."


def compute_answer(number: int) -> int:
    return number * 310 + 5


def reply(prompt: str, call: WriteCall) -> str:
    questions = list(QUESTION_PATTERN.finditer(prompt))
    if not questions:
        return "I see."
    asked = questions[-1]
    a, b, c = map(int, asked.group(1, 2, 3))
    how, since = asked.group(4), prompt[asked.end() :]
    product, total = a * b, a * b + c
    done = len(TOOL_RESULT_PATTERN.findall(since))
    thanked = THANKS in since
    if how == "badly":
        return WELCOME if thanked else MALFORMED
    if how == "plainly":
        return WELCOME if thanked else f" It is {total}."
    if how == "helped" and "transfer_to_worker" not in since:
        return call("transfer_to_worker", {})
    if how == "coded":
        code = [f'print(calc("{a} * {b}"))', f'print(calc("{product} + {c}"))', f"final_answer({total})"]
        step = f'final_answer("{WELCOME}")' if thanked else code[min(done, 2)]
        return f"I write it.\n<code>\n{step}\n</code>"
    steps = [f"{a} * {b}", f"{product} + {c}"]
    if how in ("bashed", "fenced"):
        lines = [f"echo calc says $(({step})) | tee answer.txt" for step in steps]
        line = [*lines, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"][min(done, 2)]
        return (
            call("bash", {"command": line})
            if how == "bashed"
            else f"Next.\n\n```mswea_bash_command\n{line}\n```"
        )
    if done < len(steps) and not thanked:
        return call("calc", {"expression": steps[done]})
    if how == "finally":
        return call("final_answer", {"answer": WELCOME if thanked else str(total)})
    if how == "typed":
        return call("final_result", {"value": total})
    return WELCOME if thanked else f"It is {total}."


def format_tagged_call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def format_bare_call(name: str, arguments: dict[str, object]) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


def smollm2(prompt: str, seed: int | None) -> str:
    return reply(prompt, lambda name, arguments: f"Let me see.\n{format_tagged_call(name, arguments)}")


def qwen2_5(prompt: str, seed: int | None) -> str:
    return smollm2(prompt, seed)


def qwen3(prompt: str, seed: int | None) -> str:
    return THINKING + reply(prompt, format_tagged_call)


def llama3(prompt: str, seed: int | None) -> str:
    """A call is a reply of its own."""
    return reply(prompt, format_bare_call)


def deepseek_v3(prompt: str, seed: int | None) -> str:
    return smollm2(prompt, seed)  # its own format tells of no tools, so it has the generic one
