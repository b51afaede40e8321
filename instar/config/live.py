"""Config sections for learning from live traffic."""

from __future__ import annotations

from typing import Literal

from instar.config.base import PositiveInt, Section
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
    resample: PositiveInt = 1
    """Number of replies to the last prompt of a live session that are compared, including the reply that the
    agent received. The others are sampled from the serving version, and scored by the rules and judges in
    `reward`, of which at least one is required. This is the only way to learn from greedily sampled calls.
    1 disables resampling."""
