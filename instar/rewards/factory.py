"""The configured scorer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from instar import registry
from instar.config import RunConfig
from instar.rewards.base import Scorer
from instar.types import Task


class HasScorer(Protocol):
    """A task set, as far as a scorer cares."""

    @property
    def scorer(self) -> Callable[[Task, str], float] | None: ...


def create_scorer(config: RunConfig, taskset: HasScorer | None = None) -> Scorer:
    """By ``config.reward``; a rule without a function of its own takes the task set's scorer."""
    made = registry.variant("rewards", config.reward)
    if config.reward.type == "rule":
        return made(config.reward, taskset.scorer if taskset else None)
    return made(config.reward)
