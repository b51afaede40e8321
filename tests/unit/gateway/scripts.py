"""Replies for the scripted engine, by what the prompt ends with."""

from __future__ import annotations

CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>'


def play(prompt: str, seed: int | None) -> str:
    """A tool call for a question about numbers, the tool's result as an answer, or an echo."""
    turns = prompt.split("<|im_start|>")
    role, _, said = turns[-2].removesuffix("<|im_end|>\n").partition("\n")
    if role == "tool":
        return f"The answer is {said}."
    if "*" in said:
        return f"Let me see.\n{CALL}"
    if said == "seed":
        return f"seed {seed}"
    if said == "long":
        return "word " * 200
    return f"You said: {said}"
