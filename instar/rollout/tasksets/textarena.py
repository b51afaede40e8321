"""Games of TextArena: a task is a game and a seed. `instar.agents.textarena:play` plays it."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from instar.config import TextArenaTasksConfig
from instar.errors import ConfigError
from instar.rollout.tasks import TaskSet
from instar.rollout.tasksets.optional_packages import import_package
from instar.types import Json, Task

MAX_PLAYERS = 2


def textarena_tasks(config: TextArenaTasksConfig) -> TaskSet:
    for name in config.games:
        _check_game(name, config.args)
    seeds = range(config.seed, config.seed + config.size)
    games = [(config.games[index % len(config.games)], seed) for index, seed in enumerate(seeds)]
    return TaskSet(
        [
            Task(f"{game}-{seed}", {"game": game, "seed": seed, "args": dict(config.args)})
            for game, seed in games
        ]
    )


def _check_game(name: str, args: Json) -> None:
    try:
        TextArenaGame(name, 0, args)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tasks.games: TextArena rejects {name!r}: {error}") from error


class TextArenaGame:
    """One game, from its first observation to its reward.

    Each game has its own random generator. TextArena uses Python's global generator, which other games and
    the run also use, so its state is swapped during each move.
    """

    def __init__(self, name: str, seed: int, args: Json) -> None:
        arena = import_package("textarena", "textarena")
        self._rng = random.Random(seed)
        with self._isolated_rng():
            self._env = arena.make(f"{name}-raw", **args)
            self.players = self._reset(seed)
        self._action: Any = arena.ObservationType.PLAYER_ACTION
        self.is_done = False

    def _reset(self, seed: int) -> int:
        """Reset the game with as few players as it allows, and return the number of players."""
        for players in range(1, MAX_PLAYERS + 1):
            try:
                self._env.reset(num_players=players, seed=seed)
            except AssertionError:  # TextArena raises this to reject a number of players
                continue
            return players
        raise ValueError(f"it needs more than {MAX_PLAYERS} players")

    def observe(self) -> tuple[int, str]:
        """Return the player whose turn it is, and the new messages for that player."""
        player, messages = self._env.get_observation()
        own = (player, self._action)
        return player, "\n".join(text for sender, text, kind in messages if (sender, kind) != own)

    def move(self, text: str) -> None:
        """Make a move. A text without a valid move is an invalid move; the second invalid move loses."""
        with self._isolated_rng():
            self.is_done, _ = self._env.step(text if "[" in text and "]" in text else f"[{text.strip()}]")

    def rewards(self) -> dict[int, float] | None:
        """Return each player's reward, or None if the game is not over."""
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
