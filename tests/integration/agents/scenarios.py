"""Scenarios that make an agent produce the traffic to record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.agents.agent_tools import (
    AGENT_TOOLS,
    SUBAGENT_TASK_PREFIX,
    ToolUse,
    make_codex_wait_call,
)
from tests.integration.agents.capture import Json, Script, ScriptedReply

Step = ScriptedReply | Callable[[Json], ScriptedReply]
"""A reply, or a function that makes it from the request body."""
FULL_CONTEXT_TOKENS = 1_000_000
"""More tokens than fit into any agent's context, so that the agent compacts it."""
SUMMARY = "The user wants world changed to moon in greeting.txt. It says hello world. Next: edit it."


@dataclass
class Scenario:
    """The replies to the main conversation and to each sub-agent, in order. The last reply is repeated."""

    main_steps: list[Step]
    subagent_steps: list[Step] = field(default_factory=list[Step])

    def make_script(self) -> Script:
        turn_counts: dict[str, int] = {}
        is_context_full = False

        def reply_to(dialect: str, body: Json) -> ScriptedReply:
            nonlocal is_context_full
            messages: list[Json] = body.get("messages") or body["input"]
            user_texts = [_get_text(message) for message in messages if message.get("role") == "user"]
            if is_context_full and _is_summary_request(user_texts[-1]):
                return ScriptedReply(f"<summary>{SUMMARY}</summary>", prompt_tokens=FULL_CONTEXT_TOKENS)
            if not body.get("tools"):  # the agent is requesting a title for its session
                return ScriptedReply("A title")
            task_match = re.search(f"{SUBAGENT_TASK_PREFIX}.*", "\n".join(user_texts))
            is_subagent = task_match is not None and not any("Change the word" in text for text in user_texts)
            conversation = task_match.group() if task_match and is_subagent else "main"
            steps = self.subagent_steps if is_subagent else self.main_steps
            turn = turn_counts.get(conversation, 0)
            turn_counts[conversation] = turn + 1
            step = steps[min(turn, len(steps) - 1)]
            reply = step if isinstance(step, ScriptedReply) else step(body)
            is_context_full = is_context_full or reply.prompt_tokens == FULL_CONTEXT_TOKENS
            return reply

        return reply_to


def make_edit_scenario(agent: str, path: str) -> Scenario:
    tools = AGENT_TOOLS[agent]
    return Scenario(
        [
            _reply_with_calls("Let me read it.", tools.make_read_call(path)),
            _reply_with_calls("", tools.make_edit_call(path)),
            ScriptedReply("Done."),
        ]
    )


def make_retry_scenario(agent: str, path: str) -> Scenario:
    """Return a scenario in which the second request fails once."""
    tools = AGENT_TOOLS[agent]
    return Scenario(
        [
            _reply_with_calls("Let me read it.", tools.make_read_call(path)),
            ScriptedReply(status=500),
            _reply_with_calls("", tools.make_edit_call(path)),
            ScriptedReply("Done."),
        ]
    )


def make_compaction_scenario(agent: str, path: str) -> Scenario:
    """Return a scenario with a compaction.

    The file is read again afterwards, because some agents refuse to edit a file that is not in their context.
    """
    tools = AGENT_TOOLS[agent]
    return Scenario(
        [
            _reply_with_calls("Let me read it.", tools.make_read_call(path)),
            ScriptedReply("Once more.", (tools.make_read_call(path),), prompt_tokens=FULL_CONTEXT_TOKENS),
            _reply_with_calls("Again.", tools.make_read_call(path)),
            _reply_with_calls("", tools.make_edit_call(path)),
            ScriptedReply("Done."),
        ]
    )


def make_subagent_scenario(agent: str, path: str) -> Scenario:
    """Return a scenario with two concurrent sub-agents."""
    tools = AGENT_TOOLS[agent]
    delegate_step = _reply_with_calls(
        "I ask two helpers.",
        tools.make_delegate_call(path, "words"),
        tools.make_delegate_call(path, "length"),
    )
    wait_steps: list[Step] = (
        [lambda body: _reply_with_calls("", make_codex_wait_call(json.dumps(body)))]
        if agent == "codex"
        else []
    )
    return Scenario(
        [
            delegate_step,
            *wait_steps,
            _reply_with_calls("Now I.", tools.make_read_call(path)),
            _reply_with_calls("", tools.make_edit_call(path)),
            ScriptedReply("Done."),
        ],
        [_reply_with_calls("I look.", tools.make_read_call(path)), ScriptedReply("It says hello world.")],
    )


SCENARIOS: dict[str, Callable[[str, str], Scenario]] = {
    "edit": make_edit_scenario,
    "rewriting": make_edit_scenario,
    "retry": make_retry_scenario,
    "compaction": make_compaction_scenario,
    "subagents": make_subagent_scenario,
}


def _reply_with_calls(text: str, *calls: ToolUse) -> ScriptedReply:
    return ScriptedReply(text, calls)


def _get_text(message: Json) -> str:
    content: Any = message.get("content") or message.get("output") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or part.get("content") or "") for part in content)


def _is_summary_request(text: str) -> bool:
    return SUMMARY not in text and re.search(r"summar(y|ize)|state_snapshot", text, re.I) is not None
