"""An agent that plays a TextArena game with one call per move."""

from __future__ import annotations

import random
import re
from typing import Any

from instar.agents.openai_agent import OpenAIAgent
from instar.errors import AgentError
from instar.rollout.base import AgentSession
from instar.rollout.tasksets.textarena import TextArenaGame
from instar.types import Json

OFFERED_MOVE = re.compile(r"'(\[\w+\])'")
"""The notation in which two-player games list the valid moves."""


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
        """Play the game and return the number of turns and the reward. ``unfinished`` is the reward if the
        game is not over after ``max_turns``. In a two-player game, the opponent moves at random."""
        game = TextArenaGame(task["game"], task["seed"], task["args"])
        own_player = task["seed"] % game.player_count
        opponent_rng = random.Random(f"{task['seed']}/opponent")
        messages: list[Any] = [{"role": "system", "content": hint}]
        turns = 0
        while not game.is_done and turns < max_turns:
            player, observation = game.observe()
            if player != own_player:
                game.move(_choose_random_move(task["game"], observation, opponent_rng))
                continue
            messages.append({"role": "user", "content": observation or "Your turn."})
            text = (await self.complete(session, messages, max_tokens=max_tokens)).content or ""
            messages.append({"role": "assistant", "content": text})
            game.move(text)
            turns += 1
        rewards = game.collect_rewards()
        return turns, unfinished if rewards is None else float(rewards[own_player])


play = TextArenaAgent()


def _choose_random_move(game: str, observation: str, rng: random.Random) -> str:
    """Return a random move from the last line of the observation that lists moves."""
    for line in reversed(observation.splitlines()):
        if moves := OFFERED_MOVE.findall(line):
            return rng.choice(moves)
    raise AgentError(
        f"the game {game!r} lists no valid moves, which the random opponent needs; choose a different game"
    )
