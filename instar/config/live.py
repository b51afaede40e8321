"""Config section for the agents whose live traffic a run may learn from."""

from __future__ import annotations

from typing import Literal

from instar.config.base import Section


class LiveAgentConfig(Section):
    """Sets what a run does with the live sessions of an agent, which are its sessions outside any rollout."""

    mode: Literal["observe", "learn"] = "observe"
    """`observe`: record the sessions, and never train on them. `learn`: train on them if `data` lists `live`.
    Agents that are not listed are observed."""
