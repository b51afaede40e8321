"""Scripted engine replies, one function per agent.

The agent reads the file, edits it and reports. If the task asks for helpers, it starts two sub-agents first.
A prompt without the edit tool requests a title for the session. A reply depends only on the prompt.
"""

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

TASK_PATTERN = re.compile(r"(?:moon in|Look into) (/\S+?greeting\.txt)( with helpers)?")
REPLY_START = "<|im_start|>assistant\n"


def make_script(tools: AgentTools) -> Callable[[str, int | None], str]:
    def reply(prompt: str, seed: int | None) -> str:
        task_match = TASK_PATTERN.search(prompt)
        if task_match is None or not re.search(rf"^{tools.edit[0]}\(", prompt, re.M):
            return "A title"
        path, helpers_suffix = task_match.groups()
        turn = prompt.count(REPLY_START) - 1
        if SUBAGENT_TASK_PREFIX in task_match.group():
            steps = [_format_reply("I look.", tools.make_read_call(path)), "It says hello world."]
        else:
            steps = [
                _format_reply("Let me read it.", tools.make_read_call(path)),
                _format_reply("", tools.make_edit_call(path)),
                "Done.",
            ]
            if helpers_suffix:
                calls = tools.make_delegate_call(path, "words"), tools.make_delegate_call(path, "length")
                steps.insert(0, _format_reply("I ask two helpers.", *calls))
                if tools is AGENT_TOOLS["codex"]:
                    steps.insert(1, _format_reply("", make_codex_wait_call(prompt)))
        return steps[min(turn, len(steps) - 1)]

    return reply


def _format_reply(text: str, *calls: ToolUse) -> str:
    formatted_calls = [
        f"<tool_call>{json.dumps({'name': _to_gateway_tool_name(name), 'arguments': arguments})}</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([text, *formatted_calls] if text else formatted_calls)


def _to_gateway_tool_name(name: str) -> str:
    """Return the name that the gateway gives a namespaced tool in the prompt."""
    return name.replace(".", "__")


claude_code = make_script(AGENT_TOOLS["claude-code"])
codex = make_script(AGENT_TOOLS["codex"])
qwen_code = make_script(AGENT_TOOLS["qwen-code"])
opencode = make_script(AGENT_TOOLS["opencode"])
openclaw = make_script(AGENT_TOOLS["openclaw"])
