"""The tools of each agent, and the file-editing task that the agents are given."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

FILE_NAME = "greeting.txt"
ORIGINAL_TEXT, EDITED_TEXT = "hello world\n", "hello moon\n"
SUBAGENT_TASK_PREFIX = "Look into"
"""Every sub-agent task starts with these words."""
ToolUse = tuple[str, dict[str, Any]]


def make_task(path: str) -> str:
    return f"Change the word world to moon in {path}"


@dataclass(frozen=True)
class AgentTools:
    """Templates for the tool calls with which an agent reads a file, edits it and starts a sub-agent.

    ``{path}`` and ``{prompt}`` are placeholders.
    """

    read: ToolUse
    edit: ToolUse
    delegate: ToolUse

    def make_read_call(self, path: str) -> ToolUse:
        return _fill_template(self.read, path=path)

    def make_edit_call(self, path: str) -> ToolUse:
        return _fill_template(self.edit, path=path)

    def make_delegate_call(self, path: str, topic: str) -> ToolUse:
        return _fill_template(self.delegate, prompt=f"{SUBAGENT_TASK_PREFIX} {path} and report its {topic}.")


def make_codex_wait_call(text: str) -> ToolUse:
    """Return the call that makes Codex wait for the sub-agents whose ids are in ``text``.

    Codex does not wait for sub-agents unless it calls this tool.
    """
    ids = dict.fromkeys(re.findall(r"agent_id\W+([0-9a-f-]{36})", text))
    return "multi_agent_v1.wait_agent", {"targets": list(ids), "timeout_ms": 20000}


def _fill_template(template: ToolUse, **values: str) -> ToolUse:
    def fill(value: Any) -> Any:
        if isinstance(value, str):
            for name, text in values.items():
                value = value.replace(f"{{{name}}}", text)
            return value
        if isinstance(value, dict):
            return {key: fill(inner) for key, inner in value.items()}
        return [fill(inner) for inner in value] if isinstance(value, list) else value

    return template[0], fill(template[1])


AGENT_TOOLS = {
    "claude-code": AgentTools(
        ("Read", {"file_path": "{path}"}),
        ("Edit", {"file_path": "{path}", "old_string": "world", "new_string": "moon"}),
        ("Agent", {"description": "Look", "prompt": "{prompt}", "run_in_background": False}),
    ),
    "codex": AgentTools(
        ("exec_command", {"cmd": "cat {path}"}),
        ("exec_command", {"cmd": "sed -i s/world/moon/ {path}"}),
        ("multi_agent_v1.spawn_agent", {"message": "{prompt}"}),
    ),
    "qwen-code": AgentTools(
        ("read_file", {"file_path": "{path}"}),
        ("edit", {"file_path": "{path}", "old_string": "world", "new_string": "moon"}),
        ("agent", {"description": "Look", "prompt": "{prompt}", "subagent_type": "general-purpose"}),
    ),
    "opencode": AgentTools(
        ("read", {"filePath": "{path}"}),
        ("edit", {"filePath": "{path}", "oldString": "world", "newString": "moon"}),
        ("task", {"description": "Look", "prompt": "{prompt}", "subagent_type": "general"}),
    ),
    "openclaw": AgentTools(
        ("read", {"path": "{path}"}),
        ("edit", {"path": "{path}", "edits": [{"oldText": "world", "newText": "moon"}]}),
        ("sessions_spawn", {"task": "{prompt}"}),
    ),
}
