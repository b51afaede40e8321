"""Compare the curves of the contenders: metrics, a table and diagrams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

INSTAR, BASELINE = "instar", "baseline"
TOLERANCE = 0.02
"""A mean score that is lower by at most this much is not worse."""
CLEAR_GAIN = 0.1
SOLVED_SCORE = 0.85
"""A clear win counts only if the other contender ends below this score."""
NOT_REACHED_RATIO = 10.0
"""The time ratio if Instar never reaches the score. JSON has no infinity."""


@dataclass(frozen=True)
class Point:
    seconds: float
    samples: int
    tokens: int
    score: float


@dataclass(frozen=True)
class Curve:
    """The held-out scores of one run in order of time. The first point is the untrained model."""

    seed: int
    points: Sequence[Point]
    unused_share: float = 0.0
    """The share of the started samples that the contender did not use."""

    @property
    def final(self) -> Point:
        return self.points[-1]

    def get_score_at_samples(self, samples: int) -> float:
        """Return the score of the last evaluated checkpoint that used at most this many samples, or that of
        the untrained model if the first step used more."""
        return [point.score for point in self.points if point.samples <= samples][-1]

    def get_score_at_time(self, seconds: float) -> float:
        times, scores = [p.seconds for p in self.points], [p.score for p in self.points]
        return float(np.interp(seconds, times, scores))


Results = Mapping[str, Mapping[str, Sequence[Curve]]]
"""The curves of all seeds, by task and contender."""


@dataclass(frozen=True)
class TaskComparison:
    """Instar and the best other contender on one task."""

    task: str
    rival: str
    untrained: float
    score: float
    """Instar's mean final score over the seeds."""
    rival_score: float
    time_ratio: float | None
    """The time until Instar's mean curve first reaches the rival's mean final score, relative to the time
    until the rival's mean curve first reaches it. None if the rival gained less than CLEAR_GAIN."""
    sample_gain: float
    """Instar's mean score at the rival's number of samples, minus the rival's mean final score."""
    worst_gap: float
    """The final score of Instar's worst seed, minus the rival's mean final score."""

    @property
    def is_not_worse(self) -> bool:
        return self.score >= self.rival_score - TOLERANCE

    @property
    def is_clear_win(self) -> bool:
        return self.rival_score < SOLVED_SCORE and self.score >= self.rival_score + CLEAR_GAIN


def compare_task(task: str, curves: Mapping[str, Sequence[Curve]]) -> TaskComparison | None:
    """Compare Instar with the contender that has the best mean final score. Return None if Instar or all
    others are missing. The baseline, an older Instar, is not a rival. Only common seeds are compared."""
    rivals = {name: runs for name, runs in curves.items() if name not in (INSTAR, BASELINE) and runs}
    if not curves.get(INSTAR) or not rivals:
        return None
    rival = max(rivals, key=lambda name: _average_final(rivals[name]))
    rival_by_seed = {curve.seed: curve for curve in rivals[rival]}
    own = [curve for curve in curves[INSTAR] if curve.seed in rival_by_seed]
    others = [rival_by_seed[curve.seed] for curve in own]
    if not own:
        return None
    untrained, rival_score = own[0].points[0].score, _average_final(others)
    time_ratio = None
    if rival_score - untrained >= CLEAR_GAIN:
        reached_at = find_time_to_score(own, rival_score)
        rival_reached_at = find_time_to_score(others, rival_score)
        assert rival_reached_at, "the rival's mean curve ends at its final score"
        time_ratio = NOT_REACHED_RATIO if reached_at is None else reached_at / rival_reached_at
    scores_at_samples = [
        curve.get_score_at_samples(other.final.samples) for curve, other in zip(own, others, strict=True)
    ]
    return TaskComparison(
        task=task,
        rival=rival,
        untrained=untrained,
        score=_average_final(own),
        rival_score=rival_score,
        time_ratio=time_ratio,
        sample_gain=float(np.mean(scores_at_samples)) - rival_score,
        worst_gap=min(curve.final.score for curve in own) - rival_score,
    )


def find_time_to_score(curves: Sequence[Curve], score: float) -> float | None:
    """Return the first time at which the mean of the curves reaches the score, or None if it never does."""
    times = sorted({point.seconds for curve in curves for point in curve.points})
    means = [float(np.mean([curve.get_score_at_time(time) for curve in curves])) for time in times]
    if means[0] >= score:
        return times[0]
    for (time, mean), (next_time, next_mean) in pairwise(zip(times, means, strict=True)):
        if next_mean >= score:
            return time + (next_time - time) * (score - mean) / (next_mean - mean)
    return None


def compute_metrics(comparisons: Sequence[TaskComparison]) -> dict[str, Any]:
    ratios = [c.time_ratio for c in comparisons if c.time_ratio is not None]
    return {
        "tasks": len(comparisons),
        "not_worse": sum(c.is_not_worse for c in comparisons),
        "clear_wins": sum(c.is_clear_win for c in comparisons),
        "time_ratio": max(ratios, default=None),
        "sample_gain": min((c.sample_gain for c in comparisons), default=None),
        "worst_gap": min((c.worst_gap for c in comparisons), default=None),
    }


def make_json(results: Results, comparisons: Sequence[TaskComparison]) -> dict[str, Any]:
    """Return the metrics, the comparison of each task and all curves."""
    curves = {
        task: {name: [asdict(curve) for curve in runs] for name, runs in contenders.items()}
        for task, contenders in results.items()
    }
    return {
        **compute_metrics(comparisons),
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "curves": curves,
    }


def make_run_table(results: Results) -> Table:
    columns = ["task", "contender", "untrained", "final, mean", "final, by seed", "samples", "unused"]
    table = Table(*columns, "tokens", "seconds")
    for task, contenders in results.items():
        for name, curves in contenders.items():
            if curves:
                finals = [curve.final for curve in curves]
                table.add_row(
                    task,
                    name,
                    f"{curves[0].points[0].score:.3f}",
                    f"{_average_final(curves):.3f}",
                    " ".join(f"{point.score:.3f}" for point in finals),
                    f"{np.mean([point.samples for point in finals]):.0f}",
                    f"{np.mean([curve.unused_share for curve in curves]):.0%}",
                    f"{np.mean([point.tokens for point in finals]):.0f}",
                    f"{np.mean([point.seconds for point in finals]):.0f}",
                )
    return table


def make_comparison_table(comparisons: Sequence[TaskComparison]) -> Table:
    table = Table("task", "best other", "difference", "time ratio", "gain at equal samples", "worst seed")
    for c in comparisons:
        ratio = "—" if c.time_ratio is None else f"{c.time_ratio:.2f}"
        difference = f"{c.score - c.rival_score:+.3f}"
        table.add_row(c.task, c.rival, difference, ratio, f"{c.sample_gain:+.3f}", f"{c.worst_gap:+.3f}")
    return table


def draw_curves(task: str, contenders: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw the held-out scores over seconds, samples and sampled tokens, with one line per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), sharey=True, layout="constrained")
    for axis, field in zip(axes, ("seconds", "samples", "tokens"), strict=True):
        for index, (name, curves) in enumerate(contenders.items()):
            for number, curve in enumerate(curves):
                axis.plot(
                    [getattr(point, field) for point in curve.points],
                    [point.score for point in curve.points],
                    color=f"C{index}",
                    marker=".",
                    label=name if number == 0 else None,
                )
        axis.set_xlabel("sampled tokens" if field == "tokens" else field)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out score, greedy")
    axes[0].set_ylim(0, 1)
    axes[0].legend()
    figure.suptitle(task)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _average_final(curves: Sequence[Curve]) -> float:
    return float(np.mean([curve.final.score for curve in curves]))
