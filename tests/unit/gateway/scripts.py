"""Replies for the scripted engine, chosen by the last turn of the prompt."""

from __future__ import annotations

TOOL_CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>'


def reply(prompt: str, seed: int | None) -> str:
    """Reply to the last turn.

    A tool result is answered with a sentence, a text with ``*`` with a tool call, "seed" with the seed, and
    "long" with 200 words. Any other text is echoed.
    """
    turns = prompt.split("<|im_start|>")
    role, _, text = turns[-2].removesuffix("<|im_end|>\n").partition("\n")
    if role == "tool":
        return f"The answer is {text}."
    if "*" in text:
        return f"Let me see.\n{TOOL_CALL}"
    if text == "seed":
        return f"seed {seed}"
    if text == "long":
        return "word " * 200
    return f"You said: {text}"
