"""Replies for the scripted engine, one function per agent: read the file, edit it, say so; with helpers first
where the task asks for them. What is next follows from the prompt alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.integration.agents.hands import DELEGATED, HANDS, Hands, ToolUse, codex_waiting

TASK = re.compile(r"(?:moon in|Look into) (/\S+?greeting\.txt)( with helpers)?")
REPLY = "<|im_start|>assistant\n"


def player(hands: Hands) -> Callable[[str, int | None], str]:
    def play(prompt: str, seed: int | None) -> str:
        asked = TASK.search(prompt)
        if asked is None or not re.search(rf"^{hands.edit[0]}\(", prompt, re.M):
            return "A title"
        path, helpers = asked.groups()
        turn = prompt.count(REPLY) - 1
        if DELEGATED in asked.group():
            steps = [_say("I look.", hands.reading(path)), "It says hello world."]
        else:
            steps = [_say("Let me read it.", hands.reading(path)), _say("", hands.editing(path)), "Done."]
            if helpers:
                ask = hands.delegating(path, "words"), hands.delegating(path, "length")
                steps.insert(0, _say("I ask two helpers.", *ask))
                if hands is HANDS["codex"]:
                    steps.insert(1, _say("", codex_waiting(prompt)))
        return steps[min(turn, len(steps) - 1)]

    return play


def _say(text: str, *calls: ToolUse) -> str:
    written = [
        f"<tool_call>{json.dumps({'name': _offered(name), 'arguments': arguments})}</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([text, *written] if text else written)


def _offered(name: str) -> str:
    """A tool of a namespace, as the gateway offers it to the model."""
    return name.replace(".", "__")


claude_code = player(HANDS["claude-code"])
codex = player(HANDS["codex"])
qwen_code = player(HANDS["qwen-code"])
opencode = player(HANDS["opencode"])
openclaw = player(HANDS["openclaw"])
