"""Tests the figures of `bench/live_latency.py`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


def test_summary_compares_the_open_window_with_both_closed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("live_latency")
    times = [0.01] * 99
    results = {
        "A": bench.Measurements([*times, 0.02], [0.01, 0.02, 0.03], [False] * 3),
        "B": bench.Measurements([*times, 0.03], [0.04, 0.04, 0.01], [True, True, False]),
        "C": bench.Measurements([*times, 0.02], [0.01, 0.02, 0.03], [False] * 3),
    }
    figures = bench.summarize(results)
    assert figures["p99_ratio"] == pytest.approx(1.5)
    assert figures["p99_control"] == pytest.approx(1.0)
    assert figures["return_ratio"] == pytest.approx(2.0)
    assert figures["training_share"] == pytest.approx(2 / 3)
