"""Replies for the scripted engine, chosen by the last turn of the prompt."""

from __future__ import annotations

CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>'


def play(prompt: str, seed: int | None) -> str:
    """Return a tool call for an arithmetic question, an answer for a tool result, else an echo."""
    turns = prompt.split("<|im_start|>")
    role, _, text = turns[-2].removesuffix("<|im_end|>\n").partition("\n")
    if role == "tool":
        return f"The answer is {text}."
    if "*" in text:
        return f"Let me see.\n{CALL}"
    if text == "seed":
        return f"seed {seed}"
    if text == "long":
        return "word " * 200
    return f"You said: {text}"
