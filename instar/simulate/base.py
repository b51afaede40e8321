"""What is simulated, and what comes out."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from instar.config import DistributionConfig
from instar.simulate.sessions import SimulatedSession


class EngineSpeed:
    """Tokens per second of one engine by the number of replies at once: straight lines between the points
    given, through the origin before the first, level after the last."""

    def __init__(self, points: dict[int, float]) -> None:
        self._at = [0, *sorted(points)]
        self._rates = [0.0, *(points[size] for size in sorted(points))]
        self._per_reply: dict[int, float] = {}

    def __call__(self, batch: float) -> float:
        place = bisect_right(self._at, batch)
        if place == len(self._at):
            return self._rates[-1]
        low, high = self._at[place - 1], self._at[place]
        share = (batch - low) / (high - low)
        return self._rates[place - 1] + share * (self._rates[place] - self._rates[place - 1])

    def per_reply(self, batch: int) -> float:
        """Tokens per second of each of so many replies."""
        rate = self._per_reply.get(batch)
        if rate is None:
            rate = self._per_reply[batch] = self(batch) / batch
        return rate


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be done, and how long each piece of it takes."""

    sessions: Sequence[SimulatedSession]
    """Played in this order, over again when they run out."""
    latency: DistributionConfig
    """Of a call that has its engine for itself."""
    speed: EngineSpeed
    train_base: float
    train_per_token: float
    publish: DistributionConfig
    crowding: float = 0.0
    """Share of itself that the latency is longer by for every further call at the engine."""
    pause: float = 0.0
    failures: float = 0.0
    zero_signal: float = 0.0
    crashes_per_hour: float = 0.0
    restart: float = 60.0

    def latency_factor(self, calls: float) -> float:
        """How many times longer the latency is with so many calls at an engine."""
        return 1 + self.crowding * max(0.0, calls - 1)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What does it, and by which rules."""

    engines: int
    max_batch: int
    concurrency: int
    group_size: int
    groups_per_step: int
    """Those of exported data counted too."""
    steps: int
    max_staleness: int
    group_policy: Literal["keep", "refill", "drop"] = "keep"
    refills: int = 2
    retries: int = 2
    timeout: float = 300.0
    failed_counts: bool = False
    """Whether a failed session has a reward, and is trained on."""
    masks_stale: bool = False
    """Whether only the tokens that are too old are left out of a sample, instead of all."""
    versions_per_token: bool = True
    """Whether a reply goes on under a policy that is loaded meanwhile; else it ends under the one that it
    began with."""
    live_groups: Callable[[int], int] | None = None
    """How many groups of the first so many steps agents are run for. Default: all, there is no exported
    data."""

    def count_live_groups(self, steps: int) -> int:
        """Of the first so many steps."""
        return steps * self.groups_per_step if self.live_groups is None else self.live_groups(steps)


@dataclass(slots=True)
class SimulationResult:
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    """Trained on."""
    data_samples: int = 0
    """Those of them that are exported data."""
    generated: int = 0
    """Tokens, all sessions counted."""
    engines_idle: float = 0.0
    """Share of the engines' time without any reply to generate."""
    engines_used: float = 0.0
    """Tokens generated as a share of what the engines could at their best batch."""
    trainer_idle: float = 0.0
    in_flight: float = 0.0
    """Sessions at once, on average."""
    staleness: Counter[int] = field(default_factory=Counter[int])
    """Samples of the run's own that are trained, by how many versions they were behind."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Samples not trained on, by reason."""
    crashes: int = 0
    finished: bool = True
    """Whether the steps were all trained; else nothing went on any more, or it took too long."""
    given_up: bool = False
    """Whether it ended since one group after the other failed as a whole."""

    @property
    def samples_per_hour(self) -> float:
        return 3600 * self.samples / self.seconds if self.seconds else 0.0

    @property
    def staleness_mean(self) -> float:
        behind = sum(version * count for version, count in self.staleness.items())
        return behind / max(1, self.staleness.total())

    @property
    def dropped_share(self) -> float:
        """Of sessions that were run for nothing since they were too old."""
        stale = self.dropped["stale"]
        return stale / max(1, stale + self.staleness.total())
