"""Plays a game of TextArena, one turn of talk for every move, and returns ``(turns, reward)``."""

from __future__ import annotations

import random
import re
from typing import Any

from instar.agents.openai_agent import OpenAIAgent
from instar.errors import AgentError
from instar.rollout.base import AgentSession
from instar.rollout.tasksets.textarena import TextArenaGame
from instar.types import Json

OFFERED = re.compile(r"'(\[\w+\])'")
"""How a game for two names the moves that it would take."""


class TextArenaAgent(OpenAIAgent):
    async def __call__(
        self,
        task: Json,
        session: AgentSession,
        *,
        max_turns: int = 12,
        max_tokens: int = 24,
        unfinished: float = 0.0,
        hint: str = "Reply with your move in square brackets, and nothing else.",
    ) -> tuple[int, float]:
        """``unfinished`` is the reward of a game that so many turns did not end. In a game for two, the other
        one moves at random."""
        client = self.client_for(session)
        game = TextArenaGame(task["game"], task["seed"], task["args"])
        seat = task["seed"] % game.players
        other = random.Random(f"{task['seed']}/opponent")
        messages: list[Any] = [{"role": "system", "content": hint}]
        turns = 0
        while not game.is_done and turns < max_turns:
            player, told = game.observe()
            if player != seat:
                game.move(_any_move(told, other))
                continue
            messages.append({"role": "user", "content": told or "Your turn."})
            response = await client.chat.completions.create(
                model=session.model, messages=messages, max_tokens=max_tokens
            )
            text = response.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            game.move(text)
            turns += 1
        rewards = game.rewards()
        return turns, unfinished if rewards is None else float(rewards[seat])


play = TextArenaAgent()


def _any_move(told: str, dice: random.Random) -> str:
    """Of those that the last line with moves offers."""
    for line in reversed(told.splitlines()):
        if offered := OFFERED.findall(line):
            return dice.choice(offered)
    raise AgentError("this game does not say which moves it takes, so there is nobody to play against")
