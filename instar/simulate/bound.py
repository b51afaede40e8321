"""An upper bound on the throughput of any schedule with the same engines, trainer and concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from instar.simulate.base import ClusterSpec, Workload
from instar.simulate.sessions import SimulatedSession, compute_mean


@dataclass(frozen=True, slots=True)
class ThroughputBound:
    """Limits in samples per hour: for engines at full concurrency, and for a trainer that never waits."""

    rollout: float
    trainer: float

    @property
    def samples_per_hour(self) -> float:
        return min(self.rollout, self.trainer)

    @property
    def bottleneck(self) -> Literal["rollout", "trainer"]:
        return "trainer" if self.trainer <= self.rollout else "rollout"


class SessionCost(NamedTuple):
    """The mean cost of a session."""

    generated_tokens: float
    """Number of generated tokens, not counting the first token of each reply."""
    calls: float
    wait_seconds: float
    """Seconds spent in tools and before the first call."""
    tokens: float
    """Number of tokens in the session's samples, including prompts."""


class SlotCost(NamedTuple):
    """The means per slot of a trained group."""

    samples: float
    tokens: float
    """Number of tokens in these samples, including prompts."""
    cost: SessionCost
    """The total cost of the sessions, including failed sessions and the sessions of dropped groups."""


def compute_upper_bound(workload: Workload, cluster: ClusterSpec) -> ThroughputBound:
    """Compute an upper bound on the throughput. It is 0 if every group is dropped.

    Sessions that wait for a tool or a first token generate nothing. At x sessions per second with a mean wait
    of w, x·w of the C concurrent sessions are waiting. So x times the mean number of tokens per session is at
    most the engines' speed at C - x·w replies. This holds for means, because the speed is concave in the
    batch size and the latency is linear in the number of calls. The duration of one step is added, because
    the last step is trained after the last session has ended.
    """
    groups = cluster.count_rollout_groups(cluster.steps)
    rollout_slots = cluster.group_size * groups
    data_samples = cluster.group_size * (cluster.groups_per_step * cluster.steps - groups)
    slot = compute_slot_cost(workload, cluster)
    if slot is None:
        return ThroughputBound(rollout=0.0, trainer=0.0)
    data_tokens = compute_session_cost(workload.sessions, fails=False).tokens * data_samples
    signal_fraction = 1 - workload.zero_signal
    samples = signal_fraction * (slot.samples * rollout_slots + data_samples)
    tokens = signal_fraction * (slot.tokens * rollout_slots + data_tokens)
    train_seconds = workload.train_base + workload.train_per_token * tokens / cluster.steps
    step_seconds = train_seconds + compute_mean(workload.publish_seconds)
    rollout_seconds = rollout_slots / _find_max_slot_rate(workload, cluster, slot.cost)
    return ThroughputBound(
        rollout=3600 * samples / (rollout_seconds + step_seconds),
        trainer=3600 * samples / (cluster.steps * step_seconds) if step_seconds else float("inf"),
    )


def compute_slot_cost(workload: Workload, cluster: ClusterSpec) -> SlotCost | None:
    """Return the mean cost of a slot, or None if every group is dropped because of a failed session."""
    failure_rate = workload.failures
    if cluster.group_policy == "drop":
        group_success_rate = (1 - failure_rate) ** cluster.group_size
        if not group_success_rate:
            return None
        completed_sessions = (1 - failure_rate) / group_success_rate
        failed_sessions = failure_rate / group_success_rate
        completed_samples, failed_samples = 1.0, 0.0
    else:
        refills = cluster.refills if cluster.group_policy == "refill" else 0
        slot_failure_rate = failure_rate ** (refills + 1)
        completed_sessions = completed_samples = 1 - slot_failure_rate
        failed_sessions = sum(failure_rate**attempt for attempt in range(1, refills + 2))
        failed_samples = slot_failure_rate if cluster.trains_on_failed else 0.0
    completed = compute_session_cost(workload.sessions, fails=False)
    failed = compute_session_cost(workload.sessions, fails=True)
    costs = zip(completed, failed, strict=True)
    return SlotCost(
        samples=completed_samples + failed_samples,
        tokens=completed_samples * completed.tokens + failed_samples * failed.tokens,
        cost=SessionCost(*(completed_sessions * one + failed_sessions * other for one, other in costs)),
    )


def compute_session_cost(sessions: Sequence[SimulatedSession], *, fails: bool) -> SessionCost:
    """Return the mean cost of a completed session, or of a failed one if ``fails`` is True. A failed session
    is equally likely to end after any of its turns."""
    generated_tokens = calls = wait_seconds = tokens = 0.0
    for session in sessions:
        wait_seconds += session.start_seconds
        for index, turn in enumerate(session.turns):
            probability = 1 - index / len(session.turns) if fails else 1.0
            generated_tokens += probability * turn.tokens_after_first
            calls += probability
            wait_seconds += probability * turn.tool_seconds
            tokens += probability * turn.tokens
    totals = (generated_tokens, calls, wait_seconds, tokens)
    return SessionCost(*(total / len(sessions) for total in totals))


def _find_max_slot_rate(workload: Workload, cluster: ClusterSpec, cost: SessionCost) -> float:
    """Find the highest number of slots per second that the engines can sustain, by bisection."""
    tokens, latency = max(1e-9, cost.generated_tokens), cost.calls * compute_mean(workload.latency)
    low, high = 0.0, workload.speed(cluster.max_batch) * cluster.engines / tokens
    for _ in range(60):
        rate = (low + high) / 2
        calling_sessions = cluster.concurrency - rate * cost.wait_seconds
        latency_factor = workload.compute_latency_factor(calling_sessions / cluster.engines)
        generating_sessions = max(0.0, calling_sessions - rate * latency * latency_factor)
        batch_size = min(cluster.max_batch, generating_sessions / cluster.engines)
        if rate * tokens <= cluster.engines * workload.speed(batch_size):
            low = rate
        else:
            high = rate
    return low
