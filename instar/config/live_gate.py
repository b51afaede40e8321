"""Config sections for the decision whether a candidate serves an agent."""

from __future__ import annotations

from instar.config.base import Section


class GateConfig(Section):
    """The evaluation that a candidate must pass."""


class CanaryConfig(Section):
    """The share of live sessions that a candidate serves before it serves all."""
