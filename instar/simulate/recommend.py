"""Recommends the number of engines and the `max_staleness` of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from instar.simulate.base import ClusterSpec, SimulationResult, Workload
from instar.simulate.pipeline import simulate

GOOD_ENOUGH = 0.95
"""Share of the best throughput that is enough to prefer fewer engines or less staleness."""
MAX_DROPPED = 0.02
"""Maximum share of samples that may be dropped as stale. These samples come from the long sessions."""
MIN_THROUGHPUT = 0.5
"""Share of the best throughput below which more samples may be dropped."""
STEPS = 24
"""Number of steps in each simulation."""


@dataclass(frozen=True, slots=True)
class SimulationTrial:
    engines: int
    max_staleness: int
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class Recommendation:
    engines: int
    max_staleness: int
    reason: str
    trials: tuple[SimulationTrial, ...]


def recommend(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    most_engines: int,
    most_staleness: int,
    sync: bool = False,
    seed: int = 0,
    on_trial: Callable[[str], None] = lambda _: None,
) -> Recommendation | None:
    """Return the recommended number of engines and staleness, or None if no choice trains anything. The
    search chooses the staleness for the most engines, then the engines for that staleness, then the staleness
    for those engines. In ``sync`` mode the staleness is 0."""
    brief = replace(cluster, steps=min(cluster.steps, max(STEPS, 3 * (most_staleness + 1))))
    trials: dict[tuple[int, int], SimulationTrial] = {}

    def attempt(engines: int, staleness: int) -> SimulationTrial:
        trial = trials.get((engines, staleness))
        if trial is None:
            on_trial(f"{engines} engines, max_staleness {staleness}")
            outcome = simulate(workload, replace(brief, engines=engines, max_staleness=staleness), seed=seed)
            trial = trials[engines, staleness] = SimulationTrial(engines, staleness, outcome)
        return trial

    def staleness_for(engines: int) -> SimulationTrial:
        if sync:
            return attempt(engines, 0)
        return _choose_smallest([attempt(engines, k) for k in _doubling(0, most_staleness)], "max_staleness")

    counts = sorted({*_doubling(1, most_engines), cluster.engines})
    staleness = staleness_for(counts[-1]).max_staleness
    fitting = _choose_smallest([attempt(count, staleness) for count in counts], "engines")
    chosen = staleness_for(fitting.engines)
    attempt(cluster.engines, cluster.max_staleness)
    if not _best(list(trials.values())):
        return None
    return Recommendation(
        engines=chosen.engines,
        max_staleness=chosen.max_staleness,
        reason=_explain(chosen, cluster, list(trials.values())),
        trials=tuple(sorted(trials.values(), key=lambda one: (one.engines, one.max_staleness))),
    )


def _doubling(first: int, most: int) -> list[int]:
    values = [first] if first else [0]
    size = max(1, first)
    while size <= most:
        values.append(size)
        size *= 2
    return sorted({*values, most})


def _choose_smallest(trials: Sequence[SimulationTrial], by: str) -> SimulationTrial:
    """Return the smallest trial that is near the best throughput and drops few stale samples. More samples
    may be dropped if few drops would cost over half of the throughput."""
    best = _best(trials)
    fresh = [one for one in trials if one.result.dropped_share <= MAX_DROPPED]
    if fresh and _best(fresh) >= MIN_THROUGHPUT * best:
        trials, best = fresh, _best(fresh)
    good = [one for one in trials if one.result.samples_per_hour >= GOOD_ENOUGH * best]
    return min(good, key=lambda one: getattr(one, by))


def _best(trials: Sequence[SimulationTrial]) -> float:
    return max((one.result.samples_per_hour for one in trials), default=0.0)


def _explain(chosen: SimulationTrial, cluster: ClusterSpec, trials: Sequence[SimulationTrial]) -> str:
    outcome = chosen.result
    best = _best(trials)
    parts = [
        f"{outcome.samples_per_hour / best:.0%} of the best found, "
        f"{outcome.dropped_share:.1%} of samples dropped as stale"
    ]
    now = next(
        (o for o in trials if (o.engines, o.max_staleness) == (cluster.engines, cluster.max_staleness)), None
    )
    if now is not None and now is not chosen and now.result.samples_per_hour:
        change = outcome.samples_per_hour / now.result.samples_per_hour
        parts.append(f"{change:.2f} times the throughput of the current settings")
    if outcome.trainer_idle < 0.1:
        parts.append("the trainer is the limit: it is always busy, so more engines would not help")
    elif outcome.in_flight > 0.9 * cluster.concurrency:
        parts.append("rollout.concurrency is the limit: that many sessions always run")
    elif outcome.engines_used > 0.8:
        parts.append("the engines are the limit")
    else:
        parts.append("the longest sessions are the limit: engines and trainer wait for them")
    return "; ".join(parts)
