"""The configured scorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from instar import registry
from instar.config import RewardConfig, RunConfig
from instar.errors import ConfigError
from instar.rewards.agent import AgentReward
from instar.rewards.base import Scorer, Scoring
from instar.rewards.scoring import InRollout
from instar.types import RewardSource, Task


class HasScorer(Protocol):
    """A task set, as far as a scorer cares."""

    @property
    def scorer(self) -> Callable[[Task, str], float] | None: ...


def create_scorers(config: RunConfig, taskset: HasScorer | None = None) -> list[Scorer]:
    """By ``config.reward``; a rule without a function of its own takes the task set's scorer."""
    scorers = [_create(section, taskset) for section in config.reward]
    keys = [scorer.key for scorer in scorers]
    for place, key in enumerate(keys):
        if key in keys[:place]:
            raise ConfigError(f"reward.{place}: the same as reward.{keys.index(key)} ({key}); leave one out")
    _check_names(config, scorers)
    return scorers


def create_scoring(config: RunConfig, taskset: HasScorer | None = None) -> Scoring:
    """What a rollout waits for."""
    return InRollout(create_scorers(config, taskset), config.scoring)


def live_scorers(scorers: list[Scorer]) -> list[Scorer]:
    """Those that can say something of a session that no rollout ran."""
    return [scorer for scorer in scorers if not isinstance(scorer, AgentReward)]


def _create(section: RewardConfig, taskset: HasScorer | None) -> Scorer:
    made = registry.variant("rewards", section)
    if section.type == "rule":
        return made(section, taskset.scorer if taskset else None)
    return made(section)


def _check_names(config: RunConfig, scorers: list[Scorer]) -> None:
    """Whom the settings believe must be there."""
    known = {*(source.value for source in RewardSource), *(scorer.name for scorer in scorers)}
    combine = config.scoring.combine
    named = {"prefer": combine.prefer, "weights": combine.weights, "veto": combine.veto}
    for setting, names in named.items():
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"scoring.combine.{setting}: given {name!r}, which no scorer of this run is called; "
                    f"allowed: {', '.join(sorted(known))}"
                )
