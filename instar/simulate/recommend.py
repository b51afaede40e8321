"""Recommends the number of engines and `max_staleness` for a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from instar.simulate.base import ClusterSpec, SimulationResult, Workload
from instar.simulate.pipeline import simulate

GOOD_ENOUGH_FRACTION = 0.95
"""Prefer fewer engines or less staleness if they reach this fraction of the best throughput."""
MAX_STALE_FRACTION = 0.02
"""Maximum fraction of samples dropped as stale. They come from long sessions, so more would bias the data."""
MIN_FRESH_THROUGHPUT_FRACTION = 0.5
"""The limit on dropped samples is ignored if it reduces throughput below this fraction of the best."""
MIN_STEPS_PER_TRIAL = 24


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
    max_engines: int,
    max_staleness: int,
    sync: bool = False,
    seed: int = 0,
    on_trial: Callable[[str], None] = lambda _: None,
) -> Recommendation | None:
    """Recommend a number of engines and a staleness. Return None if no trial trains on any sample.

    The search chooses the staleness for the maximum number of engines, then the number of engines for that
    staleness, and finally the staleness for that number of engines. In ``sync`` mode, the staleness is 0.
    ``on_trial`` is called with a description of each trial before it runs.
    """
    steps = min(cluster.steps, max(MIN_STEPS_PER_TRIAL, 3 * (max_staleness + 1)))
    trials: list[SimulationTrial] = []

    @cache
    def run_trial(engines: int, staleness: int) -> SimulationTrial:
        on_trial(f"simulating engines={engines}, max_staleness={staleness}")
        trial_cluster = replace(cluster, steps=steps, engines=engines, max_staleness=staleness)
        result = simulate(workload, trial_cluster, seed=seed)
        trials.append(SimulationTrial(engines, staleness, result))
        return trials[-1]

    def choose_staleness(engines: int) -> SimulationTrial:
        candidates = [0] if sync else _list_candidates(0, max_staleness)
        return _choose_smallest([run_trial(engines, value) for value in candidates], "max_staleness")

    engine_counts = sorted({*_list_candidates(1, max_engines), cluster.engines})
    staleness = choose_staleness(engine_counts[-1]).max_staleness
    by_engines = [run_trial(count, staleness) for count in engine_counts]
    engines = _choose_smallest(by_engines, "engines").engines
    chosen = choose_staleness(engines)
    run_trial(cluster.engines, cluster.max_staleness)
    if not _find_best_throughput(trials):
        return None
    return Recommendation(
        engines=chosen.engines,
        max_staleness=chosen.max_staleness,
        reason=_explain(chosen, cluster, trials),
        trials=tuple(sorted(trials, key=lambda trial: (trial.engines, trial.max_staleness))),
    )


def _list_candidates(first: int, last: int) -> list[int]:
    """Return the first and the last value, and the powers of two between them."""
    return sorted({first, *(2**exponent for exponent in range(last.bit_length())), last})


def _choose_smallest(trials: Sequence[SimulationTrial], field: str) -> SimulationTrial:
    """Return the trial with the smallest ``field`` among those with few stale samples and good throughput."""
    best = _find_best_throughput(trials)
    fresh = [trial for trial in trials if trial.result.stale_fraction <= MAX_STALE_FRACTION]
    if fresh and _find_best_throughput(fresh) >= MIN_FRESH_THROUGHPUT_FRACTION * best:
        trials, best = fresh, _find_best_throughput(fresh)
    candidates = [trial for trial in trials if trial.result.samples_per_hour >= GOOD_ENOUGH_FRACTION * best]
    return min(candidates, key=lambda trial: getattr(trial, field))


def _find_best_throughput(trials: Sequence[SimulationTrial]) -> float:
    return max((trial.result.samples_per_hour for trial in trials), default=0.0)


def _explain(chosen: SimulationTrial, cluster: ClusterSpec, trials: Sequence[SimulationTrial]) -> str:
    result = chosen.result
    throughput = result.samples_per_hour
    parts = [
        f"{throughput / _find_best_throughput(trials):.0%} of the best throughput, "
        f"{result.stale_fraction:.1%} of samples dropped as stale"
    ]
    settings = (cluster.engines, cluster.max_staleness)
    current = next((trial for trial in trials if (trial.engines, trial.max_staleness) == settings), None)
    if current is not None and current is not chosen and current.result.samples_per_hour:
        speedup = throughput / current.result.samples_per_hour
        parts.append(f"{speedup:.2f} times the throughput of the current settings")
    if result.trainer_idle < 0.1:
        parts.append("the trainer is the bottleneck: it is almost always busy, so more engines do not help")
    elif result.in_flight > 0.9 * cluster.concurrency:
        parts.append("rollout.concurrency is the bottleneck: the limit is almost always reached")
    elif result.engines_used > 0.8:
        parts.append("the engines are the bottleneck")
    else:
        parts.append("the longest sessions are the bottleneck: the engines and the trainer wait for them")
    return "; ".join(parts)
