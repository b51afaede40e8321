"""Config sections for the decision whether a candidate serves an agent."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from instar.config.base import NonNegativeInt, PositiveInt, Section, UnitInterval

Days = Annotated[float, Field(gt=0)]


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

    share: Annotated[float, Field(gt=0, le=0.1)] = 0.1
    """Share of an agent's new live sessions that a version in the stage `canary` serves, at most 0.1.
    Sessions that were open before stay with the serving version."""
    sessions: PositiveInt = 20
    """Number of rewarded sessions that a canary needs before it is promoted."""
    days: Days = 7
    """Days after which a canary is promoted with fewer rewarded sessions, or rejected if their rewards are
    lower than those of the serving version."""
    rollback_days: Days = 7
    """Days after a promotion in which falling live rewards cause a rollback to the version before."""
    shadow_share: UnitInterval = 0.25
    """Share of live calls to which a version in the stage `shadow` also samples a reply, after the reply of
    the serving version was sent. Nobody sees these replies."""
    shadow_replies: PositiveInt = 20
    """Number of replies that a version in the stage `shadow` needs before it becomes a canary."""
    shadow_days: Days = 1
    """Days after which a version becomes a canary with fewer shadow replies."""
    shadow_load: NonNegativeInt = 0
    """Number of live calls up to which shadow replies are sampled. Another call interrupts them."""
