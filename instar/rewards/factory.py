"""The configured scorers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from instar import registry
from instar.config import AgentRewardConfig, RewardConfig, RuleRewardConfig, RunConfig
from instar.errors import ConfigError, ScoreError
from instar.rewards.base import GroupScorer, Scorer
from instar.rewards.scoring import InlineScoring
from instar.types import RewardSource, Task


class TextScorerSource(Protocol):
    """A task set, as far as a scorer cares."""

    @property
    def scorer(self) -> Callable[[Task, str], float] | None: ...


def create_scorers(config: RunConfig, taskset: TextScorerSource | None = None) -> list[Scorer]:
    """By ``config.reward``; a rule without a function of its own takes the task set's scorer."""
    scorers = [_create(section, taskset) for section in config.reward]
    names = [scorer.name for scorer in scorers]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(
                f"reward.{place}: called {name!r}, as reward.{names.index(name)} is; leave one out, or give "
                "it another name"
            )
    _check_names(config, scorers)
    return scorers


def create_scoring(config: RunConfig, taskset: TextScorerSource | None = None) -> InlineScoring:
    """What a rollout waits for."""
    return InlineScoring(create_scorers(config, taskset), config.scoring)


@dataclass(frozen=True)
class BackgroundScorers:
    """The scorers of a run as they work behind its sessions: no task set is at hand there."""

    scorers: list[Scorer]
    live: list[Scorer]
    """Those of them that can say something of a session that no rollout ran."""

    def are_needed(self, *, live: bool) -> bool:
        """Whether there is anything for them to do. ``live``: the run is there to serve live sessions."""
        return any(scorer.background for scorer in self.scorers) or (live and bool(self.live))


def create_background_scorers(config: RunConfig) -> BackgroundScorers:
    """Raises ConfigError for settings that no scorer can honour."""
    scorers = create_scorers(config, _MissingTextScorer())
    live = [
        scorer
        for scorer, section in zip(scorers, config.reward, strict=True)
        if not isinstance(section, AgentRewardConfig)
        and not (isinstance(section, RuleRewardConfig) and section.function is None)
        and not isinstance(scorer, GroupScorer)
    ]
    return BackgroundScorers(scorers, live)


class _MissingTextScorer:
    """Stands for the tasks of a rule that takes their own scorer, where it is made but not asked."""

    def scorer(self, task: Task, text: str) -> float:
        raise ScoreError("a session without a task has no scorer of its own")


def _create(section: RewardConfig, taskset: TextScorerSource | None) -> Scorer:
    made = registry.resolve_section("rewards", section)
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
