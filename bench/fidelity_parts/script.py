"""The scripted engine's replies in the format of each model family.

They answer the questions of the Python clients and solve the command-line agents' task, which is to edit a
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.integration.agents.agent_tools import AGENT_TOOLS
from tests.integration.clients import script as client_script
from tests.integration.clients.script import WriteCall

TASK = re.compile(r"Change the word world to moon in (/\S+?greeting\.txt)")
"""Matches the task and captures the file's path. The file is in a folder named after the agent."""

ReplyFunction = Callable[[str, int | None], str]


def make_script(reply_to_client: ReplyFunction, write_call: WriteCall, thinking: str = "") -> ReplyFunction:
    """Return a script that handles the edit task and passes other prompts to ``reply_to_client``."""

    def reply(prompt: str, seed: int | None) -> str:
        match = TASK.search(prompt)
        if match is None:
            return reply_to_client(prompt, seed)
        return thinking + reply_to_edit_task(prompt, match.group(1), write_call)

    return reply


def reply_to_edit_task(prompt: str, path: str, write_call: WriteCall) -> str:
    """Return the first step that is not in the prompt yet: read the file, edit it, report success.

    If the prompt does not offer the edit tool, the agent is requesting a title for its session.
    """
    tools = AGENT_TOOLS[Path(path).parent.name]
    edit_tool = re.escape(tools.edit[0])
    if not re.search(rf'^{edit_tool}\(|"name": "{edit_tool}"', prompt, re.M):
        return "A title"
    steps = [write_call(*tools.make_read_call(path)), write_call(*tools.make_edit_call(path))]
    return next((step for step in steps if step not in prompt), "Done.")


smollm2 = make_script(client_script.smollm2, client_script.format_tagged_call)
qwen2_5 = make_script(client_script.qwen2_5, client_script.format_tagged_call)
qwen3 = make_script(client_script.qwen3, client_script.format_tagged_call, client_script.THINKING)
llama3 = make_script(client_script.llama3, client_script.format_bare_call)
deepseek_v3 = make_script(client_script.deepseek_v3, client_script.format_tagged_call)
