"""Describes what a run learns from live traffic, for `instar status`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from instar.cluster.control import RoleStatus
from instar.config import RunConfig
from instar.live.learning_window import read_schedule
from instar.live.windows import HORIZON_DAYS, WindowState
from instar.store.base import Store
from instar.types import Channel, PolicyState

UP = ("starting", "running", "draining")


class PolicyReport(msgspec.Struct, frozen=True):
    policy_id: str
    agents: list[str]
    """The agents that the policy learns from."""
    serving: int
    candidates: dict[int, str]
    """The stage of each version that is neither serving nor rejected."""

    def describe(self) -> str:
        newest = list(self.candidates.items())[-1:]
        candidate = "".join(f", {stage} version {version}" for version, stage in newest) or ", no candidate"
        older = len(self.candidates) - 1
        more = f" and {older} older" if older > 0 else ""
        base = "" if self.serving else " (the base model)"
        return f"serves version {self.serving}{base}{candidate}{more}"


class LearningReport(msgspec.Struct, frozen=True, kw_only=True):
    """Describes how a run learns from live traffic. If it does not, it has no policies and no window."""

    sessions: dict[str, int]
    """The number of live sessions by status."""
    rewards: dict[str, int]
    """The number of rewards by source."""
    policies: list[PolicyReport]
    window: WindowState | None
    training: str
    """The activity of the trainer, or the reason why there is none."""

    def list_rows(self) -> list[tuple[str, str]]:
        rows = [
            (f"policy {policy.policy_id}", f"{policy.describe()}; learns from {', '.join(policy.agents)}")
            for policy in self.policies
        ]
        rows.append(("training", self.training))
        if self.window is not None:
            rows.append(("window", describe_window(self.window)))
        return rows


async def make_learning_report(
    config: RunConfig, store: Store, roles: Sequence[RoleStatus]
) -> LearningReport:
    progress = await store.progress(config.name, Channel.LIVE)
    return LearningReport(
        sessions=progress.sessions,
        rewards=await store.reward_counts(config.name),
        policies=await _list_policies(config, store) if config.trains_on_live else [],
        window=read_schedule(config) if config.trains_on_live else None,
        training=_describe_training(config, roles),
    )


async def _list_policies(config: RunConfig, store: Store) -> list[PolicyReport]:
    reports: list[PolicyReport] = []
    for policy_id in config.policy_ids:
        rows = await store.policy_versions(policy_id)
        reports.append(
            PolicyReport(
                policy_id,
                [agent for agent in config.learning_agents if config.get_policy_id(agent) == policy_id],
                (await store.latest_policy(policy_id)).version,
                {
                    row.policy.version: row.stage.value
                    for row in rows
                    if row.stage.is_pending and row.state is PolicyState.PUBLISHED
                },
            )
        )
    return reports


def _describe_training(config: RunConfig, roles: Sequence[RoleStatus]) -> str:
    trainers = [role for role in roles if role.role == "trainer"]
    for role in trainers:
        if role.state in UP:
            return role.doing or role.state
        if role.state != "down":
            return f"no, the trainer has the state {role.state}"
    if not config.trains_on_live:
        return "no, because `data` does not list `live`"
    return "no, because no trainer is running; `instar train CONFIG --resume` starts it"


def describe_window(state: WindowState) -> str:
    if state.is_open:
        until = "" if state.until is None else f" until {format_future(state.until)}"
        return f"open{until}: {state.reason}"
    if state.until is None:
        return f"closed for the next {HORIZON_DAYS} days: {state.reason}"
    return f"opens {format_future(state.until)}: {state.reason}"


def format_future(seconds: float) -> str:
    """Return a local time: the time of day for today, or else the weekday and the date."""
    moment, today = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if moment[:3] == today[:3] else "%a %Y-%m-%d %H:%M", moment)
