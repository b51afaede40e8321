"""Creates the configured scorers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from instar import registry
from instar.config import RewardConfig, RunConfig
from instar.config.rollout import can_score_live
from instar.errors import ConfigError, ScoreError
from instar.rewards.base import GroupScorer, Scorer
from instar.rewards.scoring import InlineScoring
from instar.types import RewardSource, Task


class TextScorerSource(Protocol):
    @property
    def scorer(self) -> Callable[[Task, str], float] | None: ...


def create_scorers(config: RunConfig, taskset: TextScorerSource | None = None) -> list[Scorer]:
    """Create the configured scorers. A rule without a function uses the task set's scorer. Raises ConfigError
    if two scorers have the same name, or if `scoring.combine` names an unknown scorer."""
    scorers = [_create_scorer(config, section, taskset) for section in config.reward]
    names = [scorer.name for scorer in scorers]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(
                f"reward.{index}: the name {name!r} is already used by reward.{names.index(name)}; rename or "
                "remove one of them"
            )
    known = {*(source.value for source in RewardSource), *names}
    for setting in ("prefer", "weights", "veto"):
        for name in getattr(config.scoring.combine, setting):
            if name not in known:
                raise ConfigError(
                    f"scoring.combine.{setting}: unknown scorer {name!r}; "
                    f"available: {', '.join(sorted(known))}"
                )
    return scorers


def create_scoring(config: RunConfig, taskset: TextScorerSource | None = None) -> InlineScoring:
    return InlineScoring(create_scorers(config, taskset), config.scoring)


@dataclass(frozen=True)
class BackgroundScorers:
    """All scorers of a run, created without the task set. ``live_scorers`` can also score live sessions."""

    scorers: list[Scorer]
    live_scorers: list[Scorer]
    rollout_scorers: list[Scorer]
    """The scorers that score train and val sessions in the background. In a run that accepts groups from
    outside, rules are among them, because no rollout runs the rules."""

    def are_needed(self, *, serves_live: bool) -> bool:
        """True if any session in the run must be scored in the background."""
        return bool(self.rollout_scorers) or (serves_live and bool(self.live_scorers))


def create_background_scorers(config: RunConfig) -> BackgroundScorers:
    """Create a run's scorers without the task set. Raises ConfigError like `create_scorers`."""
    scorers = create_scorers(config, None if config.accepts_groups else _MissingTaskSet())
    live = [
        scorer
        for scorer, section in zip(scorers, config.reward, strict=True)
        if can_score_live(section) and not isinstance(scorer, GroupScorer)
    ]
    background = [scorer for scorer in scorers if scorer.background]
    if config.accepts_groups:
        background += [scorer for scorer in live if not scorer.background]
    return BackgroundScorers(scorers, live, background)


class _MissingTaskSet:
    """Used instead of the task set. Rules that need the task set's scorer do not run in this process."""

    def scorer(self, task: Task, text: str) -> float:
        raise ScoreError("the task set's scorer is not available in this process")


def _create_scorer(config: RunConfig, section: RewardConfig, taskset: TextScorerSource | None) -> Scorer:
    create = registry.resolve_section("rewards", section)
    if section.type == "agent":
        return create(section, config.gateway.reward_range)
    if section.type == "rule":
        return create(section, taskset.scorer if taskset else None)
    return create(section)
