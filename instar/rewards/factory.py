"""The configured scorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from instar import registry
from instar.config import RewardConfig, RunConfig
from instar.rewards.base import Scorer, Transcript
from instar.types import Reward, Task


class HasScorer(Protocol):
    """A task set, as far as a scorer cares."""

    @property
    def scorer(self) -> Callable[[Task, str], float] | None: ...


class Several(Scorer):
    """All of them, one after another."""

    name = "several"

    def __init__(self, scorers: list[Scorer]) -> None:
        self.scorers = scorers

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        return [reward for scorer in self.scorers for reward in await scorer.score(task, transcript)]


def create_scorers(config: RunConfig, taskset: HasScorer | None = None) -> list[Scorer]:
    """By ``config.reward``; a rule without a function of its own takes the task set's scorer."""
    return [_create(section, taskset) for section in config.reward]


def create_scorer(config: RunConfig, taskset: HasScorer | None = None) -> Scorer:
    """All that are configured, as one."""
    scorers = create_scorers(config, taskset)
    return scorers[0] if len(scorers) == 1 else Several(scorers)


def _create(section: RewardConfig, taskset: HasScorer | None) -> Scorer:
    made = registry.variant("rewards", section)
    if section.type == "rule":
        return made(section, taskset.scorer if taskset else None)
    return made(section)
