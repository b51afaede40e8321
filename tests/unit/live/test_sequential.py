"""Tests of the anytime-valid bounds by simulation, with a look after every item."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from instar.live.sequential import FRACTIONS, compute_bounds, get_candidate_alpha

ALPHA = 0.05
PATHS = 4000
ITEMS = 420
LOSSES = [-1.0, 0.0, 1.0]

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def draw_discrete(mean: float, changed: float) -> Draw:
    """Return a source of differences of 0 and ±1, of which the share ``changed`` is not 0."""
    win, loss = (changed + mean) / 2, (changed - mean) / 2
    return lambda rng, shape: rng.choice(LOSSES, shape, p=[loss, 1 - changed, win])


def draw_beta(mean: float) -> Draw:
    share = (1 + mean) / 2
    return lambda rng, shape: 2 * rng.beta(2 * share, 2 * (1 - share), shape) - 1


def count_crossings(draw: Draw, threshold: float, alpha: float = ALPHA) -> float:
    """Return the share of paths whose lower bound exceeds the threshold after at least one item. The capital
    at the threshold decides this, as in `compute_bounds`, but for all paths at the same time."""
    differences = draw(np.random.default_rng(7), (PATHS, ITEMS))
    shares, mean = (1 + differences) / 2, (1 + threshold) / 2
    logs = np.stack([np.log(1 - f + f * shares / mean).cumsum(axis=1) for f in FRACTIONS])
    capital = np.logaddexp.reduce(logs, axis=0) - math.log(len(FRACTIONS))
    return float((capital.max(axis=1) >= -math.log(alpha)).mean())


@pytest.mark.parametrize(
    ("draw", "threshold"),
    [
        (draw_discrete(0.0, 0.2), 0.0),
        (draw_discrete(0.0, 1.0), 0.0),
        (draw_discrete(-0.05, 0.05), -0.05),
        (draw_discrete(-0.05, 0.4), -0.05),
        (draw_beta(0.0), 0.0),
        (draw_beta(-0.05), -0.05),
    ],
)
def test_false_promotions_under_continuous_monitoring_are_at_most_alpha(draw: Draw, threshold: float) -> None:
    assert count_crossings(draw, threshold) <= ALPHA


@pytest.mark.parametrize(
    ("draw", "threshold", "power"),
    [
        (draw_discrete(0.3, 0.5), 0.0, 0.95),
        (draw_discrete(0.15, 0.2), 0.0, 0.95),
        (draw_discrete(0.0, 0.05), -0.05, 0.95),
        (draw_beta(0.2), 0.0, 0.95),
    ],
)
def test_true_improvements_are_found_within_420_items(draw: Draw, threshold: float, power: float) -> None:
    assert count_crossings(draw, threshold) >= power


def test_tenth_candidate_still_passes_an_unchanged_sanity_set() -> None:
    assert compute_bounds([0.0] * 300, get_candidate_alpha(ALPHA, 10)).lower > -0.05


def test_bounds_agree_with_the_capital_and_contain_the_mean() -> None:
    rng = np.random.default_rng(3)
    differences = draw_discrete(0.2, 0.5)(rng, (1, 120))[0]
    previous_width = 2.0
    for count in (10, 40, 120):
        bounds = compute_bounds(differences[:count].tolist(), ALPHA)
        assert bounds.lower < bounds.mean < bounds.upper
        assert bounds.items == count
        assert bounds.upper - bounds.lower < previous_width
        previous_width = bounds.upper - bounds.lower
        share = (1 + bounds.lower) / 2
        factors = 1 - FRACTIONS[:, None] + FRACTIONS[:, None] * ((1 + differences[:count]) / 2) / share
        assert np.prod(factors, axis=1).mean() == pytest.approx(1 / ALPHA, rel=1e-4)


def test_bounds_do_not_depend_on_the_order_and_are_symmetric() -> None:
    differences = [1.0, 0.0, -1.0, 0.5, 0.25, 0.0, 1.0]
    bounds = compute_bounds(differences, ALPHA)
    assert compute_bounds(differences[::-1], ALPHA) == pytest.approx(bounds)
    mirrored = compute_bounds([-d for d in differences], ALPHA)
    assert (mirrored.lower, mirrored.upper) == pytest.approx((-bounds.upper, -bounds.lower))


def test_bounds_without_items_exclude_nothing() -> None:
    assert compute_bounds([], ALPHA) == (0, 0.0, -1.0, 1.0)
    assert compute_bounds([-1.0] * 50, ALPHA).lower == -1.0
    assert compute_bounds([1.0] * 50, ALPHA).upper == 1.0


def test_difference_outside_the_range_is_rejected() -> None:
    with pytest.raises(ValueError, match="between -1 and 1"):
        compute_bounds([0.0, 1.5], ALPHA)


def test_error_budget_of_all_candidates_is_at_most_alpha() -> None:
    parts = [get_candidate_alpha(ALPHA, number) for number in range(1, 2000)]
    assert 0.99 * ALPHA < sum(parts) < ALPHA
    assert parts == sorted(parts, reverse=True)
