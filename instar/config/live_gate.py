"""Config sections for the decision whether a candidate serves an agent."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from instar.config.base import NonNegativeInt, PositiveInt, Section, UnitInterval

Days = Annotated[float, Field(gt=0)]


class GateConfig(Section):
    """The evaluation that a candidate must pass."""


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
