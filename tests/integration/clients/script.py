"""Scripted engine replies to the clients' questions, one function per model family.

A reply depends only on the prompt: on its last question and the tool results after it. The last word of a
question selects the style of the replies, because the clients have different tools.
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
"""Formats a tool call from its name and arguments, as the model family writes it."""


def make_question(number: int, style: str = "stepwise") -> str:
    """Return a question whose last word selects the style of the scripted replies (see `reply`)."""
    return f"Work out {number} * 310 + 5 {style}."


def compute_answer(number: int) -> int:
    return number * 310 + 5


def reply(prompt: str, write_call: WriteCall) -> str:
    """Return the next reply to the last question in the prompt, in the style that it selects:

    stepwise      call the calc tool twice, then give the answer as text
    handoff       like stepwise, after a handoff to a second agent
    typed         like stepwise, but give the answer with the tool final_result
    final_answer  like stepwise, but give the answer with the tool final_answer
    code          write Python code that calls calc
    bash          run commands with the tool bash
    bash_block    run commands in a Markdown code block
    plain         give the answer as text, without tools
    malformed     write a tool call that cannot be parsed
    """
    questions = list(QUESTION_PATTERN.finditer(prompt))
    if not questions:
        return "I see."
    match = questions[-1]
    a, b, c = map(int, match.group(1, 2, 3))
    style, later_text = match.group(4), prompt[match.end() :]
    product, total = a * b, a * b + c
    result_count = len(TOOL_RESULT_PATTERN.findall(later_text))
    is_thanked = THANKS in later_text
    if style == "malformed":
        return WELCOME if is_thanked else MALFORMED
    if style == "plain":
        return WELCOME if is_thanked else f" It is {total}."
    if style == "handoff" and "transfer_to_worker" not in later_text:
        return write_call("transfer_to_worker", {})
    if style == "code":
        code = [f'print(calc("{a} * {b}"))', f'print(calc("{product} + {c}"))', f"final_answer({total})"]
        step = f'final_answer("{WELCOME}")' if is_thanked else code[min(result_count, 2)]
        return f"I write it.\n<code>\n{step}\n</code>"
    steps = [f"{a} * {b}", f"{product} + {c}"]
    if style in ("bash", "bash_block"):
        commands = [f"echo calc says $(({step})) | tee answer.txt" for step in steps]
        command = [*commands, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"][min(result_count, 2)]
        return (
            write_call("bash", {"command": command})
            if style == "bash"
            else f"Next.\n\n```mswea_bash_command\n{command}\n```"
        )
    if result_count < len(steps) and not is_thanked:
        return write_call("calc", {"expression": steps[result_count]})
    if style == "final_answer":
        return write_call("final_answer", {"answer": WELCOME if is_thanked else str(total)})
    if style == "typed":
        return write_call("final_result", {"value": total})
    return WELCOME if is_thanked else f"It is {total}."


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
    """Return a reply without text before its tool call, in the format of Llama 3."""
    return reply(prompt, format_bare_call)


def deepseek_v3(prompt: str, seed: int | None) -> str:
    return smollm2(prompt, seed)  # its own format has no tools, so it uses the generic one
