"""The inputs and the result of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from instar.config import DistributionConfig
from instar.simulate.sessions import SimulatedSession


class EngineSpeed:
    """Tokens per second of one engine as a function of the number of concurrent replies. The function is
    piecewise linear from the origin through the points and constant after the last point."""

    def __init__(self, points: dict[int, float]) -> None:
        self._sizes = [0, *sorted(points)]
        self._rates = [0.0, *(points[size] for size in sorted(points))]
        self._reply_rates: dict[int, float] = {}

    def __call__(self, batch_size: float) -> float:
        return float(np.interp(batch_size, self._sizes, self._rates))

    def get_reply_rate(self, batch_size: int) -> float:
        """Return the tokens per second of one of ``batch_size`` concurrent replies."""
        rate = self._reply_rates.get(batch_size)
        if rate is None:
            rate = self._reply_rates[batch_size] = self(batch_size) / batch_size
        return rate


@dataclass(frozen=True, slots=True)
class Workload:
    """The sessions to run and the assumed timings and rates. Most fields are settings of `SimulateConfig`."""

    sessions: Sequence[SimulatedSession]
    """The sessions in the order in which they run, starting over after the last one."""
    latency: DistributionConfig
    """Seconds until the first token of a call if the engine has no other calls."""
    speed: EngineSpeed
    train_base: float
    train_per_token: float
    publish_seconds: DistributionConfig
    latency_growth_per_call: float = 0.0
    """Relative increase in latency for each other call in progress on the engine."""
    pause: float = 0.0
    failures: float = 0.0
    zero_signal: float = 0.0
    crashes_per_hour: float = 0.0
    restart_seconds: float = 60.0

    def compute_latency_factor(self, calls: float) -> float:
        return 1 + self.latency_growth_per_call * max(0.0, calls - 1)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The engines and the scheduling rules of a run."""

    engines: int
    max_batch: int
    concurrency: int
    group_size: int
    groups_per_step: int
    """Number of groups per step, including groups from exported data."""
    steps: int
    max_staleness: int
    group_policy: Literal["keep", "refill", "drop"] = "keep"
    refills: int = 2
    retries: int = 2
    timeout: float = 300.0
    trains_on_failed: bool = False
    masks_stale: bool = False
    """If True, stale tokens are masked; otherwise samples with stale tokens are dropped."""
    versions_per_token: bool = True
    """True if replies continue under a new policy, so that their tokens can have different versions."""
    rollout_group_counter: Callable[[int], int] | None = None
    """Returns how many groups in the first n steps are run by agents. If None, agents run all groups."""

    def count_rollout_groups(self, steps: int) -> int:
        counter = self.rollout_group_counter
        return steps * self.groups_per_step if counter is None else counter(steps)


@dataclass(slots=True)
class SimulationResult:
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    data_samples: int = 0
    """Number of trained samples from exported data."""
    generated_tokens: int = 0
    """Number of generated tokens, not counting the first token of each reply."""
    engines_idle: float = 0.0
    """Fraction of the time in which an engine generates nothing, averaged over the engines."""
    engines_used: float = 0.0
    """Generated tokens as a fraction of what the engines can generate at the maximum batch size."""
    trainer_idle: float = 0.0
    """Fraction of the time in which the trainer neither trains nor publishes."""
    in_flight: float = 0.0
    """Mean number of concurrent sessions."""
    staleness: Counter[int] = field(default_factory=Counter[int])
    """Number of trained rollout samples by staleness in steps."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Number of sessions without a trained sample, by reason."""
    crashes: int = 0
    finished: bool = True
    """True if all steps were trained. Otherwise the run got stuck, was given up, or took too long."""
    given_up: bool = False
    """True if the run was stopped because every session failed in several consecutive groups."""

    @property
    def samples_per_hour(self) -> float:
        return 3600 * self.samples / self.seconds if self.seconds else 0.0

    @property
    def staleness_mean(self) -> float:
        total = sum(steps * count for steps, count in self.staleness.items())
        return total / max(1, self.staleness.total())

    @property
    def stale_fraction(self) -> float:
        """Fraction of the rollout samples that were dropped as stale instead of trained on."""
        stale = self.dropped["stale"]
        return stale / max(1, stale + self.staleness.total())
