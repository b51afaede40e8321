"""TextArena: a task is a game with a seed. `instar.agents.textarena:play` plays it."""

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

MOST_PLAYERS = 2


def textarena_tasks(config: TextArenaTasksConfig) -> TaskSet:
    for name in config.games:
        _check(name, config.args)
    seeds = range(config.seed, config.seed + config.size)
    games = [(config.games[place % len(config.games)], seed) for place, seed in enumerate(seeds)]
    return TaskSet(
        [
            Task(f"{game}-{seed}", {"game": game, "seed": seed, "args": dict(config.args)})
            for game, seed in games
        ]
    )


def _check(name: str, args: Json) -> None:
    try:
        TextArenaGame(name, 0, args)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tasks.games: TextArena refuses {name!r}: {error}") from error


class TextArenaGame:
    """One game, from its first observation to its reward.

    Its dice are its own: TextArena draws from Python's one generator, which other games and the run draw from
    too, so that is put aside while the game moves.
    """

    def __init__(self, name: str, seed: int, args: Json) -> None:
        arena = import_package("textarena", "textarena")
        self._rng = random.Random(seed)
        with self._isolated_rng():
            self._env = arena.make(f"{name}-raw", **args)
            self.players = self._begin(seed)
        self._action: Any = arena.ObservationType.PLAYER_ACTION
        self.is_done = False

    def _begin(self, seed: int) -> int:
        """With as few players as the game can be played with."""
        for players in range(1, MOST_PLAYERS + 1):
            try:
                self._env.reset(num_players=players, seed=seed)
            except AssertionError:  # how TextArena says that it takes another number of players
                continue
            return players
        raise ValueError(f"it needs more than {MOST_PLAYERS} players")

    def observe(self) -> tuple[int, str]:
        """Whose turn it is, and what that player has been told since its last one."""
        player, news = self._env.get_observation()
        own = (player, self._action)
        told = [text for sender, text, kind in news if (sender, kind) != own]
        return player, "\n".join(told)

    def move(self, text: str) -> None:
        """A game that cannot be read from the text counts it as an invalid move; the second one loses."""
        with self._isolated_rng():
            self.is_done, _ = self._env.step(text if "[" in text and "]" in text else f"[{text.strip()}]")

    def rewards(self) -> dict[int, float] | None:
        """By player, once it is done."""
        return self._env.close()[0] if self.is_done else None

    @contextmanager
    def _isolated_rng(self) -> Generator[None]:
        outer = random.getstate()
        random.setstate(self._rng.getstate())
        try:
            yield
        finally:
            self._rng.setstate(random.getstate())
            random.setstate(outer)
