"""Config section for the workload and timings that `instar simulate` assumes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from instar.config.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section, UnitInterval

RENAMED_SETTINGS = {
    "most": "max",
    "tool": "tool_seconds",
    "start": "start_seconds",
    "crowding": "latency_growth_per_call",
    "publish": "publish_seconds",
    "restart": "restart_seconds",
    "most_engines": "max_engines",
    "most_staleness": "max_staleness",
}


class SimulateSection(Section):
    """A section that reports the new name if a setting's old name is used."""

    @model_validator(mode="before")
    @classmethod
    def _reject_old_names(cls, value: Any) -> Any:
        for old in RENAMED_SETTINGS.keys() & (value if isinstance(value, dict) else {}):
            raise ValueError(f"the setting {old!r} was renamed to {RENAMED_SETTINGS[old]!r}")
        return value


class DistributionConfig(SimulateSection):
    """A distribution: constant (a bare number), lognormal, or drawn from values (a bare list)."""

    value: NonNegativeFloat | None = None
    """Constant value."""
    median: Annotated[float, Field(gt=0)] | None = None
    """Median of a lognormal distribution."""
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm. At 1, one value in a hundred exceeds ten times the median."""
    max: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of a lognormal distribution; larger samples are clipped. Default: no bound."""
    values: Annotated[list[NonNegativeFloat], Field(min_length=1)] | None = None
    """Values to draw from, all equally likely."""

    @model_validator(mode="after")
    def _check_one_is_set(self) -> Self:
        set_names = [name for name in ("value", "median", "values") if getattr(self, name) is not None]
        if len(set_names) != 1:
            shown = ", ".join(set_names) or "none of them"
            raise ValueError(f"set exactly one of value, median and values, got {shown}")
        return self


def _expand_shorthand(value: Any) -> Any:
    if isinstance(value, int | float):
        return {"value": value}
    return {"values": value} if isinstance(value, list) else value


Distribution = Annotated[DistributionConfig, BeforeValidator(_expand_shorthand)]


class SimulateConfig(SimulateSection):
    """The assumptions of `instar simulate`. With `--from RUN_DIR`, values measured in that run replace them,
    except `pause`, `crashes_per_hour` and `restart_seconds`. A workload file replaces the sessions. The
    defaults describe a small model with one GPU for the engine and one for the trainer."""

    workload: Path | None = None
    """File with sessions to replay, one JSON object per line: `{"turns": [[prompt tokens, generated tokens,
    tool seconds], ...]}`. Default: sessions are drawn from the distributions below."""
    turns: Distribution = DistributionConfig(value=4)
    """Number of model calls in a session."""
    prompt: Distribution = DistributionConfig(value=200)
    """Number of new prompt tokens in each call."""
    generated: Distribution = DistributionConfig(median=200, sigma=1.0, max=4096)
    """Number of tokens in a reply."""
    tool_seconds: Distribution = DistributionConfig(median=0.5, sigma=1.5, max=300)
    """Seconds between a reply and the next call or the end of the session."""
    start_seconds: Distribution = DistributionConfig(value=0.05)
    """Seconds from the start of a session to its first call."""
    latency: Distribution = DistributionConfig(value=0.05)
    """Seconds from a call to its first token, if the engine is otherwise idle."""
    latency_growth_per_call: NonNegativeFloat = 0.0
    """Relative increase in latency for each additional call in progress on the engine."""
    speed: Annotated[dict[PositiveInt, Annotated[float, Field(gt=0)]], Field(min_length=1)] = {
        1: 250.0,
        16: 3600.0,
        64: 11000.0,
        256: 20900.0,
    }
    """Tokens per second of one engine, by the number of concurrent replies."""
    train_base: NonNegativeFloat = 0.5
    """Seconds of a training step that do not depend on the number of tokens."""
    train_per_token: NonNegativeFloat = 2e-5
    """Additional seconds of a training step per token, including prompts."""
    publish_seconds: Distribution = DistributionConfig(value=0.3)
    """Seconds from an update until all engines serve the new policy."""
    pause: NonNegativeFloat = 0.0
    """Seconds of `publish_seconds` during which the engines are paused."""
    failures: UnitInterval = 0.0
    """Fraction of sessions that fail."""
    zero_signal: UnitInterval = 0.0
    """Fraction of groups without a training signal, because all their rewards are equal."""
    crashes_per_hour: NonNegativeFloat = 0.0
    """Number of crashes per hour of each engine."""
    restart_seconds: NonNegativeFloat = 60.0
    """Seconds until a crashed engine responds again."""
    max_engines: PositiveInt = 64
    """Maximum number of engines that the search tries, unless the run has more."""
    max_staleness: NonNegativeInt = 8
    """Maximum `trainer.max_staleness` that the search tries, unless the run's own value is higher."""
