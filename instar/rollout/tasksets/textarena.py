"""TextArena games. A task is a game with a seed, which the agent `instar.agents.textarena:play` plays."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from instar.config import TextArenaTasksConfig
from instar.errors import ConfigError
from instar.rollout.tasks import TaskSet, import_package
from instar.types import Json, Task

MAX_PLAYERS = 2


def textarena_tasks(config: TextArenaTasksConfig) -> TaskSet:
    for name in config.games:
        try:
            TextArenaGame(name, 0, config.args)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tasks.games: TextArena cannot start the game {name!r}: {error}") from error
    seeds = range(config.seed, config.seed + config.size)
    games = [(config.games[index % len(config.games)], seed) for index, seed in enumerate(seeds)]
    args = dict(config.args)
    tasks = [Task(f"{game}-{seed}", {"game": game, "seed": seed, "args": args}) for game, seed in games]
    return TaskSet(tasks)


class TextArenaGame:
    """One game with its own random generator. TextArena uses Python's global generator, so that generator's
    state is replaced while the game starts and during each move."""

    def __init__(self, name: str, seed: int, args: Json) -> None:
        arena = import_package("textarena", "textarena")
        self._rng = random.Random(seed)
        with self._isolated_rng():
            self._env = arena.make(f"{name}-raw", **args)
            self.player_count = self._reset(seed)
        self._player_action_type: Any = arena.ObservationType.PLAYER_ACTION
        self.is_done = False

    def _reset(self, seed: int) -> int:
        """Reset the game with the smallest allowed number of players, and return that number."""
        for players in range(1, MAX_PLAYERS + 1):
            try:
                self._env.reset(num_players=players, seed=seed)
            except AssertionError:  # TextArena raises this to reject a number of players
                continue
            return players
        raise ValueError(f"the game needs more than {MAX_PLAYERS} players")

    def observe(self) -> tuple[int, str]:
        """Return the player whose turn it is, and the new messages for that player."""
        player, messages = self._env.get_observation()
        own_action = (player, self._player_action_type)
        return player, "\n".join(text for sender, text, kind in messages if (sender, kind) != own_action)

    def move(self, text: str) -> None:
        """Make the move in brackets in ``text``. If there are no brackets, the whole text is the move. A
        player's second invalid move loses the game."""
        with self._isolated_rng():
            self.is_done, _ = self._env.step(text if "[" in text and "]" in text else f"[{text.strip()}]")

    def collect_rewards(self) -> dict[int, float] | None:
        """Close the game if it is over, and return the rewards by player. Return None if it is not over."""
        return self._env.close()[0] if self.is_done else None

    @contextmanager
    def _isolated_rng(self) -> Generator[None]:
        global_state = random.getstate()
        random.setstate(self._rng.getstate())
        try:
            yield
        finally:
            self._rng.setstate(random.getstate())
            random.setstate(global_state)
