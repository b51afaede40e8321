"""What `instar simulate` is told of a run's times, where it does not measure them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from instar.config.base import NonNegative, Positive, Section, Unit

Amount = Annotated[float, Field(ge=0)]


class DistributionConfig(Section):
    """How a quantity varies: always the same (a bare number will do), lognormal, or drawn from a list."""

    value: Amount | None = None
    """Always this."""
    median: Annotated[float, Field(gt=0)] | None = None
    """Of a lognormal distribution."""
    sigma: Amount = 0.0
    """Its spread: the standard deviation of the logarithm. With 1, one in a hundred is ten medians long."""
    most: Annotated[float, Field(gt=0)] | None = None
    """What a lognormal value is cut at. Default: nothing."""
    values: Annotated[list[Amount], Field(min_length=1)] | None = None
    """Drawn from these, each as likely as the other."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = [name for name in ("value", "median", "values") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give one of value, median and values; given: {', '.join(kinds) or 'none'}")
        return self


def _from_bare(given: Any) -> Any:
    if isinstance(given, int | float):
        return {"value": given}
    return {"values": given} if isinstance(given, list) else given


Distribution = Annotated[DistributionConfig, BeforeValidator(_from_bare)]


class SimulateConfig(Section):
    """What `instar simulate` takes for granted. A run measured by `--from` replaces all that it can tell,
    a workload file the sessions. The defaults are a small model on one GPU each for engine and trainer."""

    workload: Path | None = None
    """A file of sessions to replay, one JSON object a line: `{"turns": [[prompt tokens, generated tokens,
    seconds of the tool], ...]}`. Default: sessions are drawn from the distributions below."""
    turns: Distribution = DistributionConfig(value=4)
    """Model calls of a session."""
    prompt: Distribution = DistributionConfig(value=200)
    """Tokens that a call's prompt adds to what the session had."""
    generated: Distribution = DistributionConfig(median=200, sigma=1.0, most=4096)
    """Tokens of a reply."""
    tool: Distribution = DistributionConfig(median=0.5, sigma=1.5, most=300)
    """Seconds between a reply and the session's next call, or its end."""
    start: Distribution = DistributionConfig(value=0.05)
    """Seconds from a session's begin to its first call."""
    latency: Distribution = DistributionConfig(value=0.05)
    """Seconds from a call to its first token, where the engine has no other."""
    crowding: Amount = 0.0
    """Share of itself that the latency is longer by for every further call at the engine."""
    speed: Annotated[dict[Positive, Annotated[float, Field(gt=0)]], Field(min_length=1)] = {
        1: 250.0,
        16: 3600.0,
        64: 11000.0,
        256: 20900.0,
    }
    """Tokens per second of one engine, by the number of replies it generates at once."""
    train_base: Amount = 0.5
    """Seconds of a training step that do not depend on its tokens."""
    train_per_token: Amount = 2e-5
    """Further seconds per token of the step, prompts counted."""
    publish: Distribution = DistributionConfig(value=0.3)
    """Seconds from the update to all engines serving it."""
    pause: Amount = 0.0
    """Seconds of them that the engines stand still."""
    failures: Unit = 0.0
    """Share of sessions that fail."""
    zero_signal: Unit = 0.0
    """Share of groups that have nothing to learn from: all rewards are the same."""
    crashes_per_hour: Amount = 0.0
    """Of one engine."""
    restart: Amount = 60.0
    """Seconds until a crashed engine answers again."""
    most_engines: Positive = 64
    """Up to how many engines to look for a better number."""
    most_staleness: NonNegative = 8
    """Up to which `trainer.max_staleness` to look."""
