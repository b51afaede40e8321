"""How finished sessions are scored, and what several rewards come to."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from instar.config.base import NonNegative, Positive, Seconds, Section


class CombineConfig(Section):
    """What the rewards of a session, or of a call, come to. A reward is named by its scorer (`math`,
    `judge:outcome`), or by its source: `human`, `judge`, `rule`, `agent`, `fallback`."""

    how: Literal["prefer", "sum"] = "prefer"
    """`prefer`: the latest reward of the first in `prefer` that gave one. `sum`: all of them, weighted."""
    prefer: list[str] = ["human", "judge", "rule", "agent", "fallback"]
    """Whom to believe, first to last."""
    weights: dict[str, float] = {}
    """Under `sum`, what each counts for; one that is not named counts for nothing."""
    veto: dict[str, float] = {}
    """Names, each with the least that it must have given: below it, `veto_value` is the reward."""
    veto_value: float = 0.0
    """What a vetoed session is worth."""

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if self.how == "sum" and not self.weights:
            raise ValueError("weights: missing; under `sum`, a scorer that is not named counts for nothing")
        return self


class ScoringConfig(Section):
    """Scores sessions when they have ended, in the background."""

    concurrency: Positive = 16
    """Most scores at once, of each scorer."""
    deadline: Seconds = 60.0
    """Seconds of one attempt at a score."""
    retries: NonNegative = 3
    """Further attempts after a failure, with exponential backoff and jitter."""
    fallback: float | None = None
    """The reward, of source `fallback`, of a session whose scorer gave up. `null` leaves the session out of
    training."""
    combine: CombineConfig = CombineConfig()
