"""Config sections for learning from live traffic."""

from __future__ import annotations

from typing import Literal

from instar.config.base import Section
from instar.config.live_data import ReplayConfig
from instar.config.live_gate import CanaryConfig, GateConfig
from instar.config.live_window import WindowConfig


class LiveAgentConfig(Section):
    """Sets what a run does with the live sessions of an agent, which are its sessions outside any rollout."""

    mode: Literal["observe", "learn"] = "observe"
    """`observe`: record the sessions, and never train on them. `learn`: train on them if `data` lists `live`.
    Agents that are not listed are observed."""


class LiveConfig(Section):
    """Settings of a run that trains on live traffic, whose `data` lists `live`."""

    gate: GateConfig = GateConfig()
    canary: CanaryConfig = CanaryConfig()
    window: WindowConfig = WindowConfig()
    replay: ReplayConfig = ReplayConfig()
