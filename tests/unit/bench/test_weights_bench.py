"""Tests for bench/weights.py: metrics and model shapes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """The module bench/weights.py, imported with its folder on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("weights")
    for name in [name for name in sys.modules if name.split(".")[0] in ("weights", "weights_parts")]:
        del sys.modules[name]


def test_weights_bench_pause_is_the_longest_gap_around_an_update(bench: ModuleType) -> None:
    regular_times = [0.01 * i for i in range(100)]
    first_reply = [*regular_times, 1.06, 1.07, 2.09, 2.10]  # gaps of 70 ms and 1.02 s near the first update
    other_replies = [[0.995, 1.000, 1.010], [3.000, 3.030]]
    series = bench.UpdateSeries(
        first_seconds=9.0,
        updates=[bench.Update(1.0, 1.05), bench.Update(3.005, 3.006)],
        token_times=[first_reply, *other_replies],
        mean_logprob_error=0.5,
    )
    metrics = series.compute_metrics()
    assert metrics["pause_ms_max"] == pytest.approx(1020, abs=1)
    assert metrics["pause_ms_p50"] == pytest.approx((1020 + 30) / 2, abs=1)
    assert metrics["gap_ms_p50"] == pytest.approx(10, abs=0.1)
    assert metrics["gap_ms_max"] == pytest.approx(10, abs=0.1)
    assert metrics["seconds"] == pytest.approx((0.05 + 0.001) / 2)
    assert metrics["first_seconds"] == 9.0


def test_weights_bench_ignores_gaps_between_replies(bench: ModuleType) -> None:
    series = bench.UpdateSeries(
        updates=[bench.Update(1.0, 1.0)], token_times=[[0.5, 0.6, 0.95, 1.01], [5.0, 5.1]]
    )
    assert series.compute_metrics()["pause_ms_max"] == pytest.approx(60)


def test_weights_bench_shapes_have_the_parameter_counts_of_their_models(
    bench: ModuleType, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = bench.make_model(tmp_path / "model", bench.SHAPES["tiny"], "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(
        bench.SHAPES["tiny"]
    )
    assert len(AutoTokenizer.from_pretrained(folder)) == bench.SHAPES["tiny"].vocab
    assert count_parameters(bench.SHAPES["0.6B"]) == 596_049_920
    assert count_parameters(bench.SHAPES["4B"]) == 4_022_468_096


def count_parameters(shape: object) -> int:
    """Return the parameter count of a Qwen3 model with tied embeddings."""
    s = vars(shape)
    attention = s["hidden"] * s["head_dim"] * (2 * s["heads"] + 2 * s["kv_heads"]) + 2 * s["head_dim"]
    layer = attention + 3 * s["hidden"] * s["intermediate"] + 2 * s["hidden"]
    return s["vocab"] * s["hidden"] + s["layers"] * layer + s["hidden"]
