"""Tests that compare real runs in both modes with what `instar simulate` predicts from the sync run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from instar.conformance.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
STEPS = 8
TOLERANCE = 0.35
"""The maximum relative error of the predicted samples per hour, with slack for a busy machine."""


def make_environment() -> dict[str, str]:
    path = os.pathsep.join([str(BENCH), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_instar(*arguments: object) -> Any:
    command = [sys.executable, "-m", "instar.cli.main", *map(str, arguments), "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, env=make_environment(), timeout=240)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def metrics_by_mode(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The metrics of one run per mode, plus ``folder``: the folder with the YAML files of both runs."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_tiny_model(folder / "model", hidden=32, context=1024)
    workload = folder / "workload.jsonl"
    sessions = [[[8, 6, 0.2]], [[8, 6, 0.3], [4, 10, 0.2]], [[8, 6, 0.1]], [[8, 6, 2.5], [4, 6, 0.2]]]
    workload.write_text("".join(json.dumps({"turns": session}) + "\n" for session in sessions))
    sys.path.insert(0, str(BENCH))
    try:
        from async_parts.runs import RunPlan, run_training  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(BENCH))
    plan = RunPlan(
        engine={"type": "scripted", "function": "tests.integration.scripted_replies:reply", "delay": 0.01},
        model={"name": str(model), "dtype": "fp32", "device": "cpu"},
        backend={"type": "local", "threads": 1, "lora": {"rank": 4}},
        characters="digits",
        lr=1e-3,
        steps=STEPS,
        group_size=2,
        groups_per_step=2,
        concurrency=4,
        max_staleness=4,
        scale=1.0,
        speed=40.2,
        context=1024,
        eval_tasks=2,
        timeout_seconds=200.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", make_environment()["PYTHONPATH"])
        return {
            mode: run_training(plan, mode, folder, workload, 0) | {"folder": folder}
            for mode in ("sync", "async")
        }


@pytest.mark.alone
@pytest.mark.timeout(500)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_simulator_predicts_both_modes_from_the_sync_run(
    metrics_by_mode: dict[str, dict[str, Any]], mode: str
) -> None:
    metrics = metrics_by_mode[mode]
    folder = metrics["folder"]
    prediction = run_instar("simulate", folder / f"{mode}.yaml", "--from", folder / "sync", "--no-sweep")
    relative_error = prediction["samples_per_hour"] / metrics["samples_per_hour"] - 1
    print(f"{mode}: {metrics['samples_per_hour']:.0f} samples/h, prediction error {relative_error:+.1%}")
    assert prediction["finished"]
    assert abs(relative_error) < TOLERANCE
    assert metrics["samples_per_hour"] < 1.1 * prediction["bound"]


def test_async_mode_is_faster_than_sync_mode(metrics_by_mode: dict[str, dict[str, Any]]) -> None:
    assert metrics_by_mode["async"]["samples_per_hour"] > 1.3 * metrics_by_mode["sync"]["samples_per_hour"]
    assert metrics_by_mode["async"]["staleness_max"] <= 4
    assert metrics_by_mode["sync"]["staleness_max"] == 0
