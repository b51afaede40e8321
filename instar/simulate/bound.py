"""The most that any schedule could get from the same engines, trainer and places for sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from instar.simulate.base import ClusterSpec, Workload
from instar.simulate.sessions import SimulatedSession, distribution_mean

Limit = Literal["rollout", "trainer"]


@dataclass(frozen=True, slots=True)
class ThroughputBound:
    """Samples per hour."""

    rollout: float
    """What the engines can generate for as many sessions at once as there may be."""
    trainer: float
    """What the trainer can take, without ever waiting."""

    @property
    def samples_per_hour(self) -> float:
        return min(self.rollout, self.trainer)

    @property
    def limit(self) -> Limit:
        return "trainer" if self.trainer <= self.rollout else "rollout"


class SessionCost(NamedTuple):
    """What a session takes, on average."""

    generated: float
    """Tokens behind the first of each reply."""
    calls: float
    waits: float
    """Seconds in tools, and before the first call."""
    tokens: float
    """Of its samples."""


class SlotCost(NamedTuple):
    """A session's place in a group that is trained on, on average."""

    samples: float
    tokens: float
    """Of them."""
    cost: SessionCost
    """Of all sessions that are run for it."""


def upper_bound(work: Workload, plant: ClusterSpec) -> ThroughputBound:
    """Of C sessions at once, those that wait for a tool or a first token generate nothing. At x sessions per
    second that is x times their mean wait w, so x times their mean tokens is at most what the engines make
    of C - x·w replies at once; on average too, for a batch's speed is concave in its size, and the wait for
    a first token grows evenly with the calls at once. And the last step is trained when the last session
    has ended."""
    groups = plant.count_live_groups(plant.steps)
    live = plant.group_size * groups
    data = plant.group_size * (plant.groups_per_step * plant.steps - groups)
    slot, mean = expected_slot(work, plant), completed_session_cost(work.sessions)
    if slot is None:
        return ThroughputBound(rollout=0.0, trainer=0.0)
    taught = 1 - work.zero_signal
    samples = taught * (slot.samples * live + data)
    tokens = taught * (slot.tokens * live + mean.tokens * data)
    step = work.train_base + work.train_per_token * tokens / plant.steps + distribution_mean(work.publish)
    rolled = live / _slots_per_second(work, plant, slot.cost)
    return ThroughputBound(
        rollout=3600 * samples / (rolled + step),
        trainer=3600 * samples / (plant.steps * step) if step else float("inf"),
    )


def expected_slot(work: Workload, plant: ClusterSpec) -> SlotCost | None:
    """None where every group has a failure, and is dropped for it."""
    fails = work.failures
    if plant.group_policy == "drop":
        good = (1 - fails) ** plant.group_size
        if not good:
            return None
        completed, failed = (1 - fails) / good, fails / good
        kept, counted = 1.0, 0.0
    else:
        refills = plant.refills if plant.group_policy == "refill" else 0
        lost = fails ** (refills + 1)
        completed, failed = 1 - lost, sum(fails**attempt for attempt in range(1, refills + 2))
        kept, counted = completed, lost if plant.failed_counts else 0.0
    ended, cut = completed_session_cost(work.sessions), failed_session_cost(work.sessions)
    return SlotCost(
        samples=kept + counted,
        tokens=kept * ended.tokens + counted * cut.tokens,
        cost=SessionCost(*(completed * one + failed * other for one, other in zip(ended, cut, strict=True))),
    )


def completed_session_cost(sessions: Sequence[SimulatedSession]) -> SessionCost:
    """A session that does not fail."""
    turns = [turn for session in sessions for turn in session.turns]
    count = len(sessions)
    return SessionCost(
        sum(turn.tokens_after_first for turn in turns) / count,
        len(turns) / count,
        sum(session.wait_seconds for session in sessions) / count,
        sum(turn.tokens for turn in turns) / count,
    )


def failed_session_cost(sessions: Sequence[SimulatedSession]) -> SessionCost:
    """A session that ends after one of its turns, each as likely as the other."""
    generated = calls = waits = tokens = 0.0
    for session in sessions:
        turns = session.turns
        waits += session.start
        for place, turn in enumerate(turns):
            comes = 1 - place / len(turns)
            generated += comes * turn.tokens_after_first
            calls += comes
            waits += comes * turn.tool_seconds
            tokens += comes * turn.tokens
    count = len(sessions)
    return SessionCost(generated / count, calls / count, waits / count, tokens / count)


def _slots_per_second(work: Workload, plant: ClusterSpec, cost: SessionCost) -> float:
    tokens, latency = max(1e-9, cost.generated), cost.calls * distribution_mean(work.latency)
    low, high = 0.0, work.speed(plant.max_batch) * plant.engines / tokens
    for _ in range(60):
        middle = (low + high) / 2
        calling = plant.concurrency - middle * cost.waits
        generating = calling - middle * latency * work.latency_factor(calling / plant.engines)
        batch = min(plant.max_batch, max(0.0, generating) / plant.engines)
        if middle * tokens <= plant.engines * work.speed(batch):
            low = middle
        else:
            high = middle
    return low
