"""Config sections for the decision whether a candidate serves an agent."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from instar.config.base import Section


class GateConfig(Section):
    """The evaluation that a candidate must pass."""

    mode: Literal["auto", "manual", "off"] = "auto"
    """`auto`: evaluate each candidate, and promote or reject it by the result. `manual`: evaluate candidates,
    and leave the decision to a person. `off`: do not evaluate them, and hold no sessions out of training."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Highest probability with which any candidate of an agent, ever, is promoted although it is no better on
    the held-out prompts, or worse than `sanity_margin` on the sanity set."""
    min_prompts: Annotated[int, Field(ge=1)] = 30
    """Number of held-out prompts that must be compared. With fewer, only a person can promote."""
    max_items: Annotated[int, Field(ge=1)] = 200
    """Highest number of held-out prompts that are compared, the newest ones. A candidate without a decision
    by then is rejected."""
    sanity_margin: Annotated[float, Field(gt=-1, le=0)] = -0.05
    """A candidate may be worse by less than this on the sanity set, whose scores are 0 or 1."""
    deadline_days: Annotated[float, Field(gt=0)] = 7.0
    """Days after which a candidate is rejected that enough held-out prompts neither confirm nor refute."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Highest number of tokens of an evaluated reply."""
    concurrency: Annotated[int, Field(ge=1)] = 2
    """Number of prompts that are evaluated at the same time, with two replies each."""

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.max_items < self.min_prompts:
            raise ValueError(
                f"max_items: must be at least min_prompts ({self.min_prompts}), got {self.max_items}"
            )
        return self


class CanaryConfig(Section):
    """The share of live sessions that a candidate serves before it serves all."""
