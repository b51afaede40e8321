"""Replies for the scripted engine in each family's format: to the Python clients' questions, and to the task
of the command-line agents, which is to read a file and edit it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.integration.agents.hands import HANDS
from tests.integration.clients import script as clients
from tests.integration.clients.script import WriteCall

TASK = re.compile(r"Change the word world to moon in (/\S+?greeting\.txt)")
"""The file lies in a folder of the agent's name."""

Play = Callable[[str, int | None], str]


def player(play: Play, call: WriteCall, think: str = "") -> Play:
    """``play``: what replies to the Python clients."""

    def reply(prompt: str, seed: int | None) -> str:
        asked = TASK.search(prompt)
        return play(prompt, seed) if asked is None else think + edit(prompt, asked.group(1), call)

    return reply


def edit(prompt: str, path: str, call: WriteCall) -> str:
    """The first step that was not taken yet: read, edit, and say so."""
    hands = HANDS[Path(path).parent.name]
    name = re.escape(hands.edit[0])
    if not re.search(rf'^{name}\(|"name": "{name}"', prompt, re.M):
        return "A title"
    steps = [call(*hands.reading(path)), call(*hands.editing(path))]
    return next((step for step in steps if step not in prompt), "Done.")


smollm2 = player(clients.smollm2, clients.tagged)
qwen2_5 = player(clients.qwen2_5, clients.tagged)
qwen3 = player(clients.qwen3, clients.tagged, clients.THINKING)
llama3 = player(clients.llama3, clients.bare)
deepseek_v3 = player(clients.deepseek_v3, clients.tagged)
