"""Tests that fits recover the parameters of generated timings, and tests for workload files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from instar.data.linearize import linearize
from instar.errors import ConfigError
from instar.simulate.measure import CallTiming, fit_latency, fit_speed, fit_training, to_simulated_session
from instar.simulate.sessions import SimulatedSession, SimulatedTurn, read_workload, write_workload
from instar.types import Json, Link
from tests.unit.data.builders import make_call, make_session


def test_fit_speed_recovers_speed_of_shared_engines() -> None:
    """The replies come in waves of 1, 4 and 16 that begin and end together."""
    calls: list[CallTiming] = []
    start = 0.0
    for wave in range(60):
        batch_size = (1, 4, 16)[wave % 3]
        tokens = 20 + wave
        seconds = (tokens - 1) * (0.01 + 0.002 * (batch_size - 1))
        calls += [CallTiming(start, start + 0.1, start + 0.1 + seconds, tokens)] * batch_size
        start += 1.0 + seconds
    speed = fit_speed(calls, engines=1, max_batch=64)
    for batch_size in (1, 16, 64):
        assert speed(batch_size) == pytest.approx(batch_size / (0.01 + 0.002 * (batch_size - 1)), rel=0.02)
    assert fit_speed(calls, engines=4, max_batch=64)(1) < 1.1 * speed(1)


def test_fit_latency_separates_base_latency_and_growth() -> None:
    """The calls come in waves of 1, 4 and 16 that begin and end together."""
    calls: list[CallTiming] = []
    for wave in range(60):
        batch_size, start = (1, 4, 16)[wave % 3], 10.0 * wave
        first_token = start + 0.02 * (1 + 0.25 * (batch_size - 1))
        calls += [CallTiming(start, first_token, first_token + 1.0, 20)] * batch_size
    latency, growth = fit_latency(calls, engines=1)
    assert growth == pytest.approx(0.25)
    assert latency.values == pytest.approx([0.02] * len(calls))
    constant = [CallTiming(start, start + 0.3, start + 1.0, 20) for start in range(0, 50, 2)]
    assert fit_latency(constant, engines=1)[1] == 0
    faster_if_shared = [CallTiming(0.0, 0.5, 1.0, 20), *[CallTiming(2.0, 2.1, 3.0, 20)] * 16]
    assert fit_latency(faster_if_shared, engines=1)[1] == 0


def test_fit_training_separates_base_and_token_time() -> None:
    rng = random.Random(0)
    steps = [
        {"train_seconds": 2.0 + 1e-4 * tokens, "sequence_tokens": tokens}
        for tokens in (rng.randrange(1000, 50_000) for _ in range(20))
    ]
    assert fit_training(steps) == pytest.approx((2.0, 1e-4))
    constant = [{"train_seconds": 3.0, "sequence_tokens": 100}] * 5
    assert fit_training(constant) == (3.0, 0.0)
    slow_start = [{"train_seconds": 60.0, "sequence_tokens": 100}, *constant]
    assert fit_training(slow_start) == (3.0, 0.0)


def test_fit_training_uses_distinct_tokens_if_reported() -> None:
    """The duration of a step depends on its distinct tokens, not on the lengths of its samples."""
    rng = random.Random(0)
    sizes = [(rng.randrange(1000, 5000), rng.choice([2, 4, 8])) for _ in range(20)]
    steps: list[Json] = [
        {
            "train_seconds": 2.0 + 1e-3 * distinct,
            "distinct_tokens": distinct,
            "sequence_tokens": copies * distinct,
        }
        for distinct, copies in sizes
    ]
    base, per_token = fit_training([*steps, {"train_seconds": 2.0, "sequence_tokens": 0}])
    assert base == pytest.approx(2.0)
    sequence_tokens = sum(step["sequence_tokens"] for step in steps[1:])
    assert per_token * sequence_tokens == pytest.approx(
        1e-3 * sum(step["distinct_tokens"] for step in steps[1:])
    )


def test_branching_session_counts_tokens_of_all_samples() -> None:
    first = make_call("1", [1, 2, 3], [4, 5])
    second = make_call("2", [6], [7], parent=first)
    sibling = make_call("3", [8, 9], [10, 11], parent=first)
    branch = make_call("4", [1, 2], [12], link=Link.BRANCH, base_id="1", base_tokens=2)
    last = make_call("5", [13], [14], parent=second)
    calls = [first, second, sibling, branch, last]
    recorded = make_session()
    simulated = to_simulated_session(recorded, calls)
    assert [turn.prompt_tokens for turn in simulated.turns] == [3, 1, 7, 2, 1]
    assert simulated.tokens == sum(len(sample) for sample in linearize(recorded, calls))


def test_workload_file_round_trips(tmp_path: Path) -> None:
    sessions = [
        SimulatedSession((SimulatedTurn(5, 10, 0.25), SimulatedTurn(2, 1, 0.0)), 0.5),
        SimulatedSession((SimulatedTurn(0, 3, 1.0),)),
    ]
    path = tmp_path / "work.jsonl"
    write_workload(path, sessions)
    assert read_workload(path) == sessions


@pytest.mark.parametrize(
    "line", ["{}", "not json", json.dumps({"turns": []}), json.dumps({"turns": [[1, 0, 1]]}), "[1]"]
)
def test_read_workload_error_includes_line_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"turns": [[1, 2, 3]]}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_workload(path)
