"""Replies for the scripted engine, one function per agent: read the file, edit it, say so; with helpers first
where the task asks for them. What is next follows from the prompt alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.integration.agents.agent_tools import (
    AGENT_TOOLS,
    SUBAGENT_TASK_PREFIX,
    AgentTools,
    ToolUse,
    make_codex_wait_call,
)

TASK = re.compile(r"(?:moon in|Look into) (/\S+?greeting\.txt)( with helpers)?")
REPLY = "<|im_start|>assistant\n"


def make_script(hands: AgentTools) -> Callable[[str, int | None], str]:
    def play(prompt: str, seed: int | None) -> str:
        asked = TASK.search(prompt)
        if asked is None or not re.search(rf"^{hands.edit[0]}\(", prompt, re.M):
            return "A title"
        path, helpers = asked.groups()
        turn = prompt.count(REPLY) - 1
        if SUBAGENT_TASK_PREFIX in asked.group():
            steps = [_format_reply("I look.", hands.make_read_call(path)), "It says hello world."]
        else:
            steps = [
                _format_reply("Let me read it.", hands.make_read_call(path)),
                _format_reply("", hands.make_edit_call(path)),
                "Done.",
            ]
            if helpers:
                ask = hands.make_delegate_call(path, "words"), hands.make_delegate_call(path, "length")
                steps.insert(0, _format_reply("I ask two helpers.", *ask))
                if hands is AGENT_TOOLS["codex"]:
                    steps.insert(1, _format_reply("", make_codex_wait_call(prompt)))
        return steps[min(turn, len(steps) - 1)]

    return play


def _format_reply(text: str, *calls: ToolUse) -> str:
    written = [
        f"<tool_call>{json.dumps({'name': _gateway_tool_name(name), 'arguments': arguments})}</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([text, *written] if text else written)


def _gateway_tool_name(name: str) -> str:
    """A tool of a namespace, as the gateway offers it to the model."""
    return name.replace(".", "__")


claude_code = make_script(AGENT_TOOLS["claude-code"])
codex = make_script(AGENT_TOOLS["codex"])
qwen_code = make_script(AGENT_TOOLS["qwen-code"])
opencode = make_script(AGENT_TOOLS["opencode"])
openclaw = make_script(AGENT_TOOLS["openclaw"])
