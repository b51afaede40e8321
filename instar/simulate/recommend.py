"""Which number of engines and which `max_staleness` a run should have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from instar.simulate.base import ClusterSpec, SimulationResult, Workload
from instar.simulate.pipeline import simulate

GOOD_ENOUGH = 0.95
"""Of the best throughput found; what gets there with less is taken."""
MOST_DROPPED = 0.02
"""Share of samples that may be lost to staleness: it is the long sessions that are."""
WORTH_KEEPING = 0.5
"""Of the best throughput, below which more may be."""
STEPS = 24
"""Of a simulation that is one of many."""


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
    """Staleness first, with engines enough; then engines, with that staleness; then staleness again, with
    those engines. ``sync`` mode has no staleness to choose. None: nothing is trained, whatever is tried."""
    brief = replace(cluster, steps=min(cluster.steps, max(STEPS, 3 * (most_staleness + 1))))
    tried: dict[tuple[int, int], SimulationTrial] = {}

    def attempt(engines: int, staleness: int) -> SimulationTrial:
        found = tried.get((engines, staleness))
        if found is None:
            on_trial(f"{engines} engines, max_staleness {staleness}")
            outcome = simulate(workload, replace(brief, engines=engines, max_staleness=staleness), seed=seed)
            found = tried[engines, staleness] = SimulationTrial(engines, staleness, outcome)
        return found

    def staleness_for(engines: int) -> SimulationTrial:
        if sync:
            return attempt(engines, 0)
        return _least([attempt(engines, k) for k in _doubling(0, most_staleness)], "max_staleness")

    counts = sorted({*_doubling(1, most_engines), cluster.engines})
    ahead = staleness_for(counts[-1]).max_staleness
    fitting = _least([attempt(count, ahead) for count in counts], "engines")
    chosen = staleness_for(fitting.engines)
    attempt(cluster.engines, cluster.max_staleness)
    if not _best(list(tried.values())):
        return None
    return Recommendation(
        engines=chosen.engines,
        max_staleness=chosen.max_staleness,
        reason=_why(chosen, cluster, list(tried.values())),
        trials=tuple(sorted(tried.values(), key=lambda one: (one.engines, one.max_staleness))),
    )


def _doubling(first: int, most: int) -> list[int]:
    values = [first] if first else [0]
    size = max(1, first)
    while size <= most:
        values.append(size)
        size *= 2
    return sorted({*values, most})


def _least(tried: Sequence[SimulationTrial], by: str) -> SimulationTrial:
    """The smallest that is good enough: near the best throughput, and losing little to staleness unless that
    would cost half of it."""
    best = _best(tried)
    frugal = [one for one in tried if one.result.dropped_share <= MOST_DROPPED]
    if frugal and _best(frugal) >= WORTH_KEEPING * best:
        tried, best = frugal, _best(frugal)
    good = [one for one in tried if one.result.samples_per_hour >= GOOD_ENOUGH * best]
    return min(good, key=lambda one: getattr(one, by))


def _best(tried: Sequence[SimulationTrial]) -> float:
    return max((one.result.samples_per_hour for one in tried), default=0.0)


def _why(chosen: SimulationTrial, plant: ClusterSpec, tried: Sequence[SimulationTrial]) -> str:
    outcome = chosen.result
    best = _best(tried)
    parts = [
        f"{outcome.samples_per_hour / best:.0%} of the best found, "
        f"{outcome.dropped_share:.1%} of samples lost to staleness"
    ]
    now = next(
        (o for o in tried if (o.engines, o.max_staleness) == (plant.engines, plant.max_staleness)), None
    )
    if now is not None and now is not chosen and now.result.samples_per_hour:
        change = outcome.samples_per_hour / now.result.samples_per_hour
        parts.append(f"{change:.2f} times what the settings given get")
    if outcome.trainer_idle < 0.1:
        parts.append("the trainer is the limit: it is busy all the time, so more engines would not help")
    elif outcome.in_flight > 0.9 * plant.concurrency:
        parts.append("rollout.concurrency is the limit: that many sessions run all the time")
    elif outcome.engines_used > 0.8:
        parts.append("the engines are the limit")
    else:
        parts.append("the longest sessions are the limit: engines and trainer wait for them")
    return "; ".join(parts)
