"""The most that any schedule could get from the same engines, trainer and places for sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instar.simulate.base import Plant, Work
from instar.simulate.sessions import mean_of

Limit = Literal["rollout", "trainer"]


@dataclass(frozen=True, slots=True)
class Bound:
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


def bound(work: Work, plant: Plant) -> Bound:
    """Of C sessions at once, those that wait for a tool or a first token generate nothing. At x sessions per
    second that is x times their mean wait w, so x times their mean tokens is at most what the engines make
    of C - x·w replies at once; on average too, for a batch's speed is concave in its size, and the wait for
    a first token grows evenly with the calls at once. And the last step is trained when the last session
    has ended."""
    count = len(work.sessions)
    tokens = max(1e-9, sum(session.later for session in work.sessions) / count)
    sequence = sum(session.tokens for session in work.sessions) / count
    calls = sum(len(session.turns) for session in work.sessions) / count
    tools = sum(session.waits for session in work.sessions) / count
    latency = calls * mean_of(work.latency)
    kept = 1 - (0.0 if plant.failed_counts else work.failures)
    useful = kept * (1 - work.zero_signal)
    step = work.train_base + work.train_per_token * sequence * plant.batch * useful + mean_of(work.publish)
    sessions = plant.batch * plant.steps
    rolled = sessions / _sessions_per_second(work, plant, tokens, tools, latency)
    return Bound(
        rollout=3600 * useful * sessions / (rolled + step),
        trainer=3600 * useful * plant.batch / step if step else float("inf"),
    )


def _sessions_per_second(work: Work, plant: Plant, tokens: float, tools: float, latency: float) -> float:
    """The arguments are a session's: tokens, seconds in tools, seconds to the first tokens of its calls."""
    low, high = 0.0, work.speed(plant.max_batch) * plant.engines / tokens
    for _ in range(60):
        middle = (low + high) / 2
        calling = plant.concurrency - middle * tools
        generating = calling - middle * latency * work.crowded(calling / plant.engines)
        batch = min(plant.max_batch, max(0.0, generating) / plant.engines)
        if middle * tokens <= plant.engines * work.speed(batch):
            low = middle
        else:
            high = middle
    return low
