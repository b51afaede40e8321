"""Anytime-valid bounds for the mean of paired differences, by betting (Waudby-Smith and Ramdas, 2024).

A difference d in [-1, 1] is mapped to x = (1 + d) / 2. To test that the mean of x is at most m, a player bets
the fraction f of a capital of 1 on every x, at odds that are fair if the mean is m::

    capital_f(m) = product over all x of (1 - f + f * x / m)
    capital(m)   = mean of capital_f(m) over f = 1/16, 2/16, …, 15/16

If the mean is at most m, the capital is a nonnegative supermartingale that starts at 1, so it ever reaches
1 / alpha with a probability of at most alpha (Ville's inequality). The lower bound is the largest m at which
the capital has reached 1 / alpha. It holds at every time, so one may look after every difference and stop
whenever it suffices. The upper bound is the mirrored lower bound. The capital does not depend on the order of
the differences, so the bounds follow from the stored differences alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Differences = NDArray[np.float64]

FRACTIONS = np.arange(1, 16) / 16
SEARCH_STEPS = 40
"""The number of halvings of [0, 1] with which a bound is located."""


class Bounds(NamedTuple):
    """The mean of paired differences with a lower and an upper bound, each of which is wrong at any time with
    a probability of at most ``alpha``."""

    items: int
    mean: float
    lower: float
    upper: float


def compute_bounds(differences: Sequence[float], alpha: float) -> Bounds:
    """Return the bounds after these differences, which must be between -1 and 1."""
    values = np.asarray(differences, np.float64)
    if not len(values):
        return Bounds(0, 0.0, -1.0, 1.0)
    if not np.all(np.abs(values) <= 1):
        raise ValueError(f"differences must be between -1 and 1, got {values.min()} to {values.max()}")
    shares = (1 + values) / 2
    lower, upper = _find_lower_bound(shares, alpha), 1 - _find_lower_bound(1 - shares, alpha)
    return Bounds(len(values), float(values.mean()), 2 * lower - 1, 2 * upper - 1)


def _find_lower_bound(shares: Differences, alpha: float) -> float:
    """Return the largest mean that the values between 0 and 1 exclude, or 0 if they exclude none."""
    unique, counts = np.unique(shares, return_counts=True)
    low, high = 0.0, float(shares.mean())
    # The capital decreases with the mean, and is at most 1 at the observed mean.
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        if _compute_log_capital(unique, counts, middle) >= -math.log(alpha):
            low = middle
        else:
            high = middle
    return low


def _compute_log_capital(unique: Differences, counts: NDArray[np.int64], mean: float) -> float:
    if mean <= 0:
        return math.inf if unique.max() > 0 else 0.0
    factors = 1 - FRACTIONS[:, None] + FRACTIONS[:, None] * unique[None, :] / mean
    logs = (np.log(factors) * counts[None, :]).sum(axis=1)
    return float(np.logaddexp.reduce(logs) - math.log(len(FRACTIONS)))


def get_candidate_alpha(alpha: float, number: int) -> float:
    """Return the part of a lineage's error budget that its candidate ``number``, counted from 1, may spend:
    alpha * 6 / (pi * number)**2. The parts of all candidates add up to ``alpha``."""
    return alpha * 6 / (math.pi * number) ** 2
