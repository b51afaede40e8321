"""How finished sessions are scored, and how several rewards are combined."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from instar.config.base import NonNegative, Positive, Seconds, Section


class CombineConfig(Section):
    """Combines the rewards of a session or a call into one. A reward is identified by its scorer (`math`,
    `judge:outcome`) or by its source: `human`, `judge`, `rule`, `agent`, `fallback`."""

    how: Literal["prefer", "sum"] = "prefer"
    """`prefer`: the latest reward under the first name in `prefer` that has one. `sum`: the weighted sum."""
    prefer: list[str] = ["human", "judge", "rule", "agent", "fallback"]
    """Names of scorers or sources, in order of precedence."""
    weights: dict[str, float] = {}
    """Weights under `sum`, by name; a reward without a weight is ignored."""
    veto: dict[str, float] = {}
    """Minimum rewards by name. If a reward is below its minimum, the combined reward is `veto_value`."""
    veto_value: float = 0.0
    """Reward of a vetoed session."""

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if self.how == "sum" and not self.weights:
            raise ValueError("weights: missing; `how: sum` ignores rewards without a weight")
        return self


class ScoringConfig(Section):
    """How ended sessions are scored in the background."""

    concurrency: Positive = 16
    """Maximum number of concurrent scores per scorer."""
    deadline: Seconds = 60.0
    """Timeout of one attempt to score, in seconds."""
    retries: NonNegative = 3
    """Number of retries after a failure, with exponential backoff and jitter."""
    fallback: float | None = None
    """Reward of a session whose scorer failed on every attempt, recorded with source `fallback`. `null`
    excludes the session from training."""
    combine: CombineConfig = CombineConfig()
