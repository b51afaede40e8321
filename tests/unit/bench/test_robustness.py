"""Tests for bench/robustness.py: the run configs of the suites, and the figures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instar.config import RunConfig


@pytest.fixture
def robustness(bench: ModuleType) -> Iterator[Any]:
    yield importlib.import_module("robustness")
    del sys.modules["robustness"]


def test_experiments_keep_the_settings_of_their_recipes_and_shuffle_the_tasks(robustness: Any) -> None:
    experiments = robustness.list_experiments(robustness.SUITES, 10)
    configs = {e.label: RunConfig.model_validate(e.make_config()) for e in experiments}
    assert len(configs) == 10 + 6 + 15 + 1
    assert all(config.rollout and config.rollout.shuffle for config in configs.values())
    assert configs["demo/seed-3"].seed == 3
    assert configs["demo/seed-3"].trainer.steps < robustness.NEVER  # the demo ends by its steps, too
    one_turn = configs["recipes/one-turn-1"]
    assert one_turn.rollout is not None
    assert one_turn.rollout.agent.model_dump()["function"] == "instar.agents.gsm8k:solve_in_one_turn"
    assert one_turn.trainer.schedule == "linear"
    corner = configs["grid/lr-0.001-groups-12"].trainer
    assert (corner.adam.lr, corner.groups_per_step, corner.seconds) == (1e-3, 12, 180)


def test_override_changes_the_setting_in_all_runs(robustness: Any) -> None:
    overrides = ["rollout.sampling.temperature=0.7"]
    experiments = robustness.list_experiments(robustness.SUITES, 2, overrides)
    configs = [RunConfig.model_validate(e.make_config()) for e in experiments]
    assert {c.rollout.sampling.temperature for c in configs if c.rollout} == {0.7}
    assert {c.trainer.tensorboard for c in configs} == {False}  # the bench's own settings stay


def test_share_without_signal_counts_the_steps_before_the_task_is_solved(robustness: Any) -> None:
    points = [robustness.Point(seconds, 0, 0, score) for seconds, score in ((0, 0.25), (10, 0.85), (20, 1.0))]
    steps = [
        {"elapsed": 5, "groups": 6, "zero_signal": 3},
        {"elapsed": 10, "groups": 6, "zero_signal": 0},
        {"elapsed": 15, "groups": 6, "zero_signal": 6},
    ]
    assert robustness.compute_share_without_signal(steps, robustness.Curve(0, points)) == 0.25
    assert robustness.compute_share_without_signal(steps, robustness.Curve(0, points[:1])) == 0.5
    assert robustness.compute_share_without_signal([], robustness.Curve(0, points)) is None


def test_metrics_contain_the_worst_runs(robustness: Any) -> None:
    def make_result(suite: str, *scores: float, no_signal: float | None = None) -> Any:
        curve = [(10.0 * number, score) for number, score in enumerate(scores)]
        return robustness.Result(suite, "run", curve, 1, 48, no_signal)

    metrics = robustness.compute_metrics(
        [
            make_result("demo", 0.5, 1.0),
            make_result("demo", 0.25, 0.5, 0.75),
            make_result("recipes", 0.25, 0.875, no_signal=0.25),
            make_result("recipes", 0.25, 1.0, no_signal=None),
            make_result("grid", 0.25, 1.0, 0.75),
        ]
    )
    assert metrics == {
        "runs": 5,
        "demo_worst_gain": 0.5,
        "demo_worst": 0.75,
        "demo_median": 0.875,
        "demo_seconds": 20.0,
        "recipes_worst": 0.875,
        "recipes_no_signal": 0.25,
        "grid_worst_drop": 0.25,
    }


def test_result_of_a_run_with_other_settings_is_an_error(robustness: Any, tmp_path: Path) -> None:
    experiment = robustness.list_experiments(["quick"], 1)[0]
    assert robustness.read_result(experiment, tmp_path) is None
    folder = experiment.get_folder(tmp_path)
    folder.prepare({**experiment.make_complete_config(), "seed": 7})
    folder.save_checkpoints([], 0.0)
    with pytest.raises(robustness.MeasurementError, match="other settings \\(seed: 7 → 0\\)"):
        robustness.read_result(experiment, tmp_path)
