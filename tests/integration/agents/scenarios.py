"""Scripts that make an agent do what its recorded traffic is to show."""

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
FULL_CONTEXT_TOKENS = 1_000_000
"""Tokens: more than any of the agents takes for its context, so it compacts."""
SUMMARY = "The user wants world changed to moon in greeting.txt. It says hello world. Next: edit it."


@dataclass
class Scenario:
    """The replies to the main conversation in their order, and those to every sub-agent."""

    main: list[Step]
    subagent: list[Step] = field(default_factory=list[Step])

    def make_script(self) -> Script:
        turns: dict[str, int] = {}
        full = False

        def play(dialect: str, body: Json) -> ScriptedReply:
            nonlocal full
            messages: list[Json] = body.get("messages") or body["input"]
            users = [_text(message) for message in messages if message.get("role") == "user"]
            if full and _asks_for_summary(users[-1]):
                return ScriptedReply(f"<summary>{SUMMARY}</summary>", prompt_tokens=FULL_CONTEXT_TOKENS)
            if not body.get("tools"):
                return ScriptedReply("A title")
            delegated = re.search(f"{SUBAGENT_TASK_PREFIX}.*", "\n".join(users))
            helper = delegated is not None and not any("Change the word" in user for user in users)
            who = delegated.group() if delegated and helper else "main"
            steps = self.subagent if helper else self.main
            turn = turns.get(who, 0)
            turns[who] = turn + 1
            step = steps[min(turn, len(steps) - 1)]
            reply = step if isinstance(step, ScriptedReply) else step(body)
            full = full or reply.prompt_tokens == FULL_CONTEXT_TOKENS
            return reply

        return play


def edit(agent: str, path: str) -> Scenario:
    hands = AGENT_TOOLS[agent]
    return Scenario(
        [
            _reply_with_calls("Let me read it.", hands.make_read_call(path)),
            _reply_with_calls("", hands.make_edit_call(path)),
            ScriptedReply("Done."),
        ]
    )


def retry(agent: str, path: str) -> Scenario:
    """The second call fails once."""
    hands = AGENT_TOOLS[agent]
    return Scenario(
        [
            _reply_with_calls("Let me read it.", hands.make_read_call(path)),
            ScriptedReply(status=500),
            _reply_with_calls("", hands.make_edit_call(path)),
            ScriptedReply("Done."),
        ]
    )


def compaction(agent: str, path: str) -> Scenario:
    """After it the file is read again: some agents refuse to edit what their context does not hold."""
    hands = AGENT_TOOLS[agent]
    return Scenario(
        [
            _reply_with_calls("Let me read it.", hands.make_read_call(path)),
            ScriptedReply("Once more.", (hands.make_read_call(path),), prompt_tokens=FULL_CONTEXT_TOKENS),
            _reply_with_calls("Again.", hands.make_read_call(path)),
            _reply_with_calls("", hands.make_edit_call(path)),
            ScriptedReply("Done."),
        ]
    )


def subagents(agent: str, path: str) -> Scenario:
    """Two at once."""
    hands = AGENT_TOOLS[agent]
    ask = _reply_with_calls(
        "I ask two helpers.",
        hands.make_delegate_call(path, "words"),
        hands.make_delegate_call(path, "length"),
    )
    wait: list[Step] = (
        [lambda body: _reply_with_calls("", make_codex_wait_call(json.dumps(body)))]
        if agent == "codex"
        else []
    )
    return Scenario(
        [
            ask,
            *wait,
            _reply_with_calls("Now I.", hands.make_read_call(path)),
            _reply_with_calls("", hands.make_edit_call(path)),
            ScriptedReply("Done."),
        ],
        [_reply_with_calls("I look.", hands.make_read_call(path)), ScriptedReply("It says hello world.")],
    )


SCENARIOS: dict[str, Callable[[str, str], Scenario]] = {
    "edit": edit,
    "rewriting": edit,
    "retry": retry,
    "compaction": compaction,
    "subagents": subagents,
}


def _reply_with_calls(text: str, *calls: ToolUse) -> ScriptedReply:
    return ScriptedReply(text, calls)


def _text(message: Json) -> str:
    content: Any = message.get("content") or message.get("output") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or part.get("content") or "") for part in content)


def _asks_for_summary(text: str) -> bool:
    return SUMMARY not in text and re.search(r"summar(y|ize)|state_snapshot", text, re.I) is not None
