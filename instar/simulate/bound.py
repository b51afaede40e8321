"""An upper bound on the throughput of any schedule with the same engines, trainer and concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from instar.simulate.base import ClusterSpec, Workload
from instar.simulate.sessions import SimulatedSession, distribution_mean

Limit = Literal["rollout", "trainer"]


@dataclass(frozen=True, slots=True)
class ThroughputBound:
    """An upper bound on the throughput, in samples per hour."""

    rollout: float
    """The limit set by the engines at full concurrency."""
    trainer: float
    """The limit set by a trainer that never waits."""

    @property
    def samples_per_hour(self) -> float:
        return min(self.rollout, self.trainer)

    @property
    def limit(self) -> Limit:
        return "trainer" if self.trainer <= self.rollout else "rollout"


class SessionCost(NamedTuple):
    """The mean cost of a session."""

    generated: float
    """Number of tokens after the first token of each reply."""
    calls: float
    waits: float
    """Seconds spent in tools and before the first call."""
    tokens: float


class SlotCost(NamedTuple):
    """The mean cost of a slot of a group that is trained on."""

    samples: float
    tokens: float
    cost: SessionCost
    """The cost of all sessions that are run for the slot."""


def upper_bound(workload: Workload, cluster: ClusterSpec) -> ThroughputBound:
    """Return the upper bound on the throughput.

    Of C concurrent sessions, those that wait for a tool or a first token generate nothing. At x sessions per
    second these are x times the mean wait w, so x times the mean tokens is at most the engines' speed at
    C - x·w replies. This also holds for means, because the speed is concave in the batch size and the latency
    is linear in the number of calls. The last step is trained after the last session has ended.
    """
    groups = cluster.count_live_groups(cluster.steps)
    live = cluster.group_size * groups
    data = cluster.group_size * (cluster.groups_per_step * cluster.steps - groups)
    slot, mean = expected_slot(workload, cluster), completed_session_cost(workload.sessions)
    if slot is None:
        return ThroughputBound(rollout=0.0, trainer=0.0)
    with_signal = 1 - workload.zero_signal
    samples = with_signal * (slot.samples * live + data)
    tokens = with_signal * (slot.tokens * live + mean.tokens * data)
    train_seconds = workload.train_base + workload.train_per_token * tokens / cluster.steps
    step = train_seconds + distribution_mean(workload.publish)
    rollout_seconds = live / _slots_per_second(workload, cluster, slot.cost)
    return ThroughputBound(
        rollout=3600 * samples / (rollout_seconds + step),
        trainer=3600 * samples / (cluster.steps * step) if step else float("inf"),
    )


def expected_slot(workload: Workload, cluster: ClusterSpec) -> SlotCost | None:
    """Return the mean cost of a slot, or None if every group has a failure and is dropped."""
    fails = workload.failures
    if cluster.group_policy == "drop":
        good = (1 - fails) ** cluster.group_size
        if not good:
            return None
        completed, failed = (1 - fails) / good, fails / good
        kept, counted = 1.0, 0.0
    else:
        refills = cluster.refills if cluster.group_policy == "refill" else 0
        lost = fails ** (refills + 1)
        completed, failed = 1 - lost, sum(fails**attempt for attempt in range(1, refills + 2))
        kept, counted = completed, lost if cluster.failed_counts else 0.0
    ended, cut = completed_session_cost(workload.sessions), failed_session_cost(workload.sessions)
    return SlotCost(
        samples=kept + counted,
        tokens=kept * ended.tokens + counted * cut.tokens,
        cost=SessionCost(*(completed * one + failed * other for one, other in zip(ended, cut, strict=True))),
    )


def completed_session_cost(sessions: Sequence[SimulatedSession]) -> SessionCost:
    """Return the mean cost of a session that does not fail."""
    turns = [turn for session in sessions for turn in session.turns]
    count = len(sessions)
    return SessionCost(
        sum(turn.tokens_after_first for turn in turns) / count,
        len(turns) / count,
        sum(session.wait_seconds for session in sessions) / count,
        sum(turn.tokens for turn in turns) / count,
    )


def failed_session_cost(sessions: Sequence[SimulatedSession]) -> SessionCost:
    """Return the mean cost of a session that fails after one of its turns. All turns are equally likely."""
    generated = calls = waits = tokens = 0.0
    for session in sessions:
        turns = session.turns
        waits += session.start
        for index, turn in enumerate(turns):
            probability = 1 - index / len(turns)
            generated += probability * turn.tokens_after_first
            calls += probability
            waits += probability * turn.tool_seconds
            tokens += probability * turn.tokens
    count = len(sessions)
    return SessionCost(generated / count, calls / count, waits / count, tokens / count)


def _slots_per_second(workload: Workload, cluster: ClusterSpec, cost: SessionCost) -> float:
    tokens, latency = max(1e-9, cost.generated), cost.calls * distribution_mean(workload.latency)
    low, high = 0.0, workload.speed(cluster.max_batch) * cluster.engines / tokens
    for _ in range(60):
        middle = (low + high) / 2
        calling = cluster.concurrency - middle * cost.waits
        generating = calling - middle * latency * workload.latency_factor(calling / cluster.engines)
        batch = min(cluster.max_batch, max(0.0, generating) / cluster.engines)
        if middle * tokens <= cluster.engines * workload.speed(batch):
            low = middle
        else:
            high = middle
    return low
