"""Scripts that make an agent do what its recorded traffic is to show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.agents.capture import Json, Reply, Script
from tests.integration.agents.hands import DELEGATED, HANDS, ToolUse, codex_waiting

Step = Reply | Callable[[Json], Reply]
FULL = 1_000_000
"""Tokens: more than any of the agents takes for its context, so it compacts."""
SUMMARY = "The user wants world changed to moon in greeting.txt. It says hello world. Next: edit it."


@dataclass
class Scene:
    """The replies to the main conversation in their order, and those to every sub-agent."""

    main: list[Step]
    helper: list[Step] = field(default_factory=list[Step])

    def script(self) -> Script:
        turns: dict[str, int] = {}
        full = False

        def play(dialect: str, body: Json) -> Reply:
            nonlocal full
            messages: list[Json] = body.get("messages") or body["input"]
            users = [_text(message) for message in messages if message.get("role") == "user"]
            if full and _asks_for_summary(users[-1]):
                return Reply(f"<summary>{SUMMARY}</summary>", prompt_tokens=FULL)
            if not body.get("tools"):
                return Reply("A title")
            delegated = re.search(f"{DELEGATED}.*", "\n".join(users))
            helper = delegated is not None and not any("Change the word" in user for user in users)
            who = delegated.group() if delegated and helper else "main"
            steps = self.helper if helper else self.main
            turn = turns.get(who, 0)
            turns[who] = turn + 1
            step = steps[min(turn, len(steps) - 1)]
            reply = step if isinstance(step, Reply) else step(body)
            full = full or reply.prompt_tokens == FULL
            return reply

        return play


def edit(agent: str, path: str) -> Scene:
    hands = HANDS[agent]
    return Scene(
        [_use("Let me read it.", hands.reading(path)), _use("", hands.editing(path)), Reply("Done.")]
    )


def retry(agent: str, path: str) -> Scene:
    """The second call fails once."""
    hands = HANDS[agent]
    return Scene(
        [
            _use("Let me read it.", hands.reading(path)),
            Reply(status=500),
            _use("", hands.editing(path)),
            Reply("Done."),
        ]
    )


def compaction(agent: str, path: str) -> Scene:
    """After it the file is read again: some agents refuse to edit what their context does not hold."""
    hands = HANDS[agent]
    return Scene(
        [
            _use("Let me read it.", hands.reading(path)),
            Reply("Once more.", (hands.reading(path),), prompt_tokens=FULL),
            _use("Again.", hands.reading(path)),
            _use("", hands.editing(path)),
            Reply("Done."),
        ]
    )


def subagents(agent: str, path: str) -> Scene:
    """Two at once."""
    hands = HANDS[agent]
    ask = _use("I ask two helpers.", hands.delegating(path, "words"), hands.delegating(path, "length"))
    wait: list[Step] = [lambda body: _use("", codex_waiting(json.dumps(body)))] if agent == "codex" else []
    return Scene(
        [
            ask,
            *wait,
            _use("Now I.", hands.reading(path)),
            _use("", hands.editing(path)),
            Reply("Done."),
        ],
        [_use("I look.", hands.reading(path)), Reply("It says hello world.")],
    )


SCENES: dict[str, Callable[[str, str], Scene]] = {
    "edit": edit,
    "rewriting": edit,
    "retry": retry,
    "compaction": compaction,
    "subagents": subagents,
}


def _use(text: str, *calls: ToolUse) -> Reply:
    return Reply(text, calls)


def _text(message: Json) -> str:
    content: Any = message.get("content") or message.get("output") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or part.get("content") or "") for part in content)


def _asks_for_summary(text: str) -> bool:
    return SUMMARY not in text and re.search(r"summar(y|ize)|state_snapshot", text, re.I) is not None
