"""Tests for bench/learning.py: settings of the runs, checkpoints, evaluated steps and metrics."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instar.config import RunConfig
from instar.store.sqlite import SqliteStore
from instar.types import Channel, Session

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def comparison(bench: ModuleType, tmp_path: Path) -> Any:
    """A comparison with one seed in which the untrained model has the score 0.2 on `dev`."""
    results = load_part("results")
    results.RunFolder(tmp_path / "dev" / "untrained").save_score(0, results.Score(0.2, 8))
    return bench.Comparison(make_options(tmp_path))


def make_options(out: Path, *, gpu: bool = False) -> argparse.Namespace:
    python = "/trl/bin/python"
    return argparse.Namespace(
        out=out, seconds=1.0, seeds=[0], held_out=8, quick=True, gpu=gpu, trl_python=python
    )


def load_part(name: str) -> ModuleType:
    return importlib.import_module(f"learning_parts.{name}")


def save_run(comparison: Any, contender: str, samples_per_step: int, scored_steps: list[int]) -> Any:
    """Save a run on `dev` with three steps and their adapters, and with scores of some of the steps. The
    second step is not a point of the curve."""
    results = load_part("results")
    folder = comparison.get_folder("dev", contender, 0)
    folder.prepare({})
    checkpoints = [
        results.Checkpoint(step, seconds, samples_per_step * step, 0, f"adapters/{step}")
        for step, seconds in ((1, 10.0), (2, 25.0), (3, 30.0))
    ]
    for checkpoint in checkpoints:
        (folder.path / checkpoint.adapter).mkdir(parents=True)
    folder.save_checkpoints(checkpoints, 0.25)
    for step in scored_steps:
        folder.save_score(step, results.Score(0.25 * step, 8))
    return folder


def list_adapters(folder: Any) -> list[str]:
    return sorted(path.name for path in (folder.path / "adapters").iterdir())


# --- settings of the runs ------------------------------------------------------------------------


def test_instar_run_settings_keep_defaults_and_all_adapters(bench: ModuleType) -> None:
    settings = load_part("instar_run").make_run_settings(bench.TASKS["gym"], seed=3, seconds=480.0)
    config = RunConfig.model_validate(settings)
    defaults = RunConfig().trainer
    assert (config.seed, config.trainer.seconds, config.eval) == (3, 480.0, None)
    assert config.trainer.keep_checkpoints > 10_000
    assert config.sync.route == "files"
    changed = {"seconds", "steps", "checkpoint_every", "keep_checkpoints", "tensorboard"}
    assert config.trainer.model_dump(exclude=changed) == defaults.model_dump(exclude=changed)


def test_gpu_settings_differ_only_in_device_vllm_and_precision(
    bench: ModuleType, comparison: Any, tmp_path: Path
) -> None:
    on_gpu = bench.Comparison(make_options(tmp_path, gpu=True))
    list_differences = load_part("results").list_differences
    own, own_on_gpu = (c.make_settings("gsm8k", "instar", 0) for c in (comparison, on_gpu))
    assert own_on_gpu["model"] == {**own["model"], "device": "cuda"}
    engine = own_on_gpu["engine"]
    assert (engine["type"], engine["python"], engine["gpu_memory"]) == ("vllm", "/trl/bin/python", 0.3)
    assert all(d.startswith(("model.device", "engine.")) for d in list_differences(own, own_on_gpu))
    trl, trl_on_gpu = (c.make_settings("gsm8k", "trl", 0) for c in (comparison, on_gpu))
    assert {**trl, "dtype": "mixed", "micro_batch": 24, "vllm_gpu_memory": 0.3} == trl_on_gpu


def test_sweep_on_gpu_has_each_setting_once(bench: ModuleType) -> None:
    assert list(bench.make_sweep(on_gpu=True)) == [
        *("base", "lr 1e-4", "lr 1e-3", "6 groups", "bf16", "1 group"),
        *("2 groups, lr 1e-3", "bf16, lr 1e-3", "2 updates per batch"),
    ]


@pytest.mark.parametrize("contender", ["instar", "trl"])
def test_finished_run_is_not_repeated(comparison: Any, contender: str) -> None:
    folder = comparison.get_folder("dev", contender, 0)
    folder.prepare(comparison.make_settings("dev", contender, 0))
    folder.save_checkpoints([], 0.0)
    assert comparison.ensure_run("dev", contender, 0)
    assert re.fullmatch(r"[0-9a-f]{40}\n", (folder.path / "commit").read_text())


def test_finished_run_with_other_defaults_is_rejected(bench: ModuleType, comparison: Any) -> None:
    settings = comparison.make_settings("dev", "instar", 0)
    settings["trainer"]["adam"]["beta2"] = 0.5
    folder = comparison.get_folder("dev", "instar", 0)
    folder.prepare(settings)
    folder.save_checkpoints([], 0.0)
    with pytest.raises(bench.MeasurementError, match=r"\(trainer\.adam\.beta2: 0\.5 → [^,]*\); remove"):
        comparison.ensure_run("dev", "instar", 0)


def test_baseline_runs_only_with_first_seed(bench: ModuleType) -> None:
    options = argparse.Namespace(contenders=["trl", "baseline", "instar"], seeds=[3, 4])
    assert bench.select_contenders(options, 3) == ["trl", "baseline", "instar"]
    assert bench.select_contenders(options, 4) == ["trl", "instar"]


def test_busy_share_excludes_idle_time_and_waits_for_disks(bench: ModuleType) -> None:
    compute_busy_share = load_part("idle_check").compute_busy_share
    before = "cpu  100 0 50 800 50 0 0 0 30 0\ncpu0 1 2 3\n"
    assert compute_busy_share(before, "cpu  130 0 60 1450 350 0 5 5 60 0\n") == pytest.approx(50 / 1000)


# --- checkpoints and evaluations -----------------------------------------------------------------


async def test_collect_checkpoints_counts_all_sessions_tokens_and_head_start(
    bench: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # The clock started at 100. Two sessions took 1.5 s before that; another one started later.
    await write_sessions(run, [(96.0, 97.0), (96.5, 97.5), (101.0, 103.0)])
    records = [
        {"kind": "train", "step": 1, "time": 105.0, "elapsed": 5.0, "version": 1, "sessions": 24},
        {"kind": "warning", "step": 1, "text": "ignored"},
        # A step that restores a checkpoint trains on no sessions.
        {"kind": "train", "step": 2, "time": 106.0, "elapsed": 6.0, "version": 2},
        {"kind": "train", "step": 3, "time": 109.5, "elapsed": 9.5, "version": 4, "sessions": 16},
    ]
    records[0]["output_tokens_mean"], records[3]["output_tokens_mean"] = 10.0, 2.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    checkpoints = load_part("instar_run").collect_checkpoints(tmp_path)
    assert [(c.step, c.seconds, c.samples, c.tokens) for c in checkpoints] == [
        (1, 6.5, 24, 240),
        (2, 7.5, 24, 240),
        (3, 11.0, 40, 280),
    ]
    assert checkpoints[-1].adapter == "run/policies/v000004"


@pytest.mark.parametrize(
    ("times", "head_start"),
    [([(101.0, 102.0)], 0.0), ([(96.0, 103.0)], 4.0), ([(96.0, None)], 4.0)],
    ids=["later", "ends after start of clock", "still open"],
)
async def test_head_start_ends_with_start_of_clock(
    bench: ModuleType, tmp_path: Path, times: list[tuple[float, float | None]], head_start: float
) -> None:
    (tmp_path / "run").mkdir()
    await write_sessions(tmp_path / "run", times)
    assert load_part("instar_run").compute_head_start(tmp_path, 100.0) == head_start


async def write_sessions(run: Path, times: list[tuple[float, float | None]]) -> None:
    """Create a store with training sessions that started and ended at these times."""
    store = SqliteStore(run / "store.db")
    for number, (created_at, ended_at) in enumerate(times):
        common = (f"s{number}", "run", "agent", "policy", Channel.TRAIN)
        await store.open_session(Session(*common, created_at=created_at, ended_at=ended_at))
    await store.close()


async def test_unused_share_counts_training_sessions_in_store(bench: ModuleType, tmp_path: Path) -> None:
    assert bench.compute_unused_share(tmp_path, used_samples=3) == 0.0
    (tmp_path / "run").mkdir()
    store = SqliteStore(tmp_path / "run" / "store.db")
    for number, channel in enumerate([Channel.TRAIN] * 4 + [Channel.VAL]):
        await store.open_session(Session(f"s{number}", "run", "agent", "policy", channel))
    await store.close()
    assert bench.compute_unused_share(tmp_path, used_samples=3) == 0.25


def test_select_steps_has_final_compared_and_curve_checkpoints(bench: ModuleType) -> None:
    results = load_part("results")
    checkpoints = [results.Checkpoint(step, 5.0 * step, 24 * step, 0, "") for step in range(1, 101)]
    assert results.select_steps(checkpoints, [199, 5]) == {6, 8, 12, 20, 30, 50, 75, 100}
    assert results.select_steps([], [199]) == set()


def test_other_adapters_are_removed_only_after_all_contenders_finished(comparison: Any) -> None:
    own = save_run(comparison, "instar", 48, scored_steps=[1, 3])
    comparison.evaluate_seed("dev", ["trl", "instar"], 0)  # TRL has not finished
    assert list_adapters(own) == ["1", "2", "3"]
    rival = save_run(comparison, "trl", 24, scored_steps=[1, 3])
    comparison.evaluate_seed("dev", ["trl", "instar"], 0)
    assert list_adapters(own) == list_adapters(rival) == ["1", "3"]


def test_evaluation_with_missing_adapter_at_compared_samples_raises(
    bench: ModuleType, comparison: Any
) -> None:
    save_run(comparison, "trl", 24, scored_steps=[1, 2, 3])
    own = save_run(comparison, "instar", 36, scored_steps=[1, 3])
    own.remove_other_adapters({1, 3})
    with pytest.raises(bench.MeasurementError, match="the adapter of step 2 is missing"):
        comparison.evaluate_seed("dev", ["trl", "instar"], 0)


def test_curve_of_run_without_final_score_is_missing(comparison: Any) -> None:
    folder = save_run(comparison, "trl", 24, scored_steps=[1])
    assert comparison.load_curve("dev", "trl", 0) is None
    folder.save_score(3, load_part("results").Score(0.75, 8))
    assert [p.score for p in comparison.load_curve("dev", "trl", 0).points] == [0.2, 0.25, 0.75]


def test_collect_sweep_has_scores_steps_and_samples_of_each_setting(
    bench: ModuleType, comparison: Any
) -> None:
    save_run(comparison, "trl-2-groups-lr-1e-3", 16, scored_steps=[1, 3])
    settings = bench.make_sweep(on_gpu=False)
    sweep = bench.collect_sweep(comparison, settings)
    assert sweep.keys() == settings.keys()
    result = sweep["2 groups, lr 1e-3"]
    assert (result["scores"], result["steps"], result["samples"]) == ([0.75], [3], [48])
    assert result["settings"]["groups"] == 2
    assert sweep["1 group"]["scores"] == []
    assert json.loads(json.dumps(sweep)) == sweep


# --- metrics ------------------------------------------------------------------------------------


def make_curve(bench: ModuleType, seed: int, *points: tuple[float, int, float]) -> Any:
    """Return a curve of points (seconds, samples, score) that starts at the score 0.2."""
    return bench.Curve(seed, [bench.Point(s, n, 10 * n, score) for s, n, score in ((0.0, 0, 0.2), *points)])


def test_compare_task_uses_mean_curves_equal_samples_and_worst_seed(bench: ModuleType) -> None:
    curves = {
        "trl": [
            make_curve(bench, 0, (240, 100, 0.5), (480, 200, 0.5)),
            make_curve(bench, 1, (240, 120, 0.9), (480, 240, 0.7)),
        ],
        "instar": [
            make_curve(bench, 0, (48, 192, 0.4), (144, 600, 0.8), (480, 2000, 0.9)),
            make_curve(bench, 1, (48, 240, 0.6), (144, 600, 0.6), (480, 2000, 0.7)),
        ],
        "baseline": [make_curve(bench, 0, (480, 2000, 1.0))],
    }
    result = bench.compare_task("gym", curves)
    assert result.rival == "trl"
    assert (result.untrained, result.score, result.rival_score) == pytest.approx((0.2, 0.8, 0.6))
    # The mean curve is at 0.5 after 48 s and at 0.7 after 144 s, so it reaches 0.6 after 96 s. TRL's rises
    # from 0.2 to 0.7 in 240 s, so it first reaches its final score of 0.6 after 192 s.
    assert result.time_ratio == pytest.approx(96 / 192)
    assert result.sample_gain == pytest.approx(0.5 - 0.6)
    assert result.worst_gap == pytest.approx(0.1)
    assert result.is_not_worse
    assert result.is_clear_win


def test_compare_task_with_score_never_reached_has_maximal_time_ratio(bench: ModuleType) -> None:
    curves = {
        "trl": [make_curve(bench, 0, (480, 200, 0.9))],
        "instar": [make_curve(bench, 0, (480, 2000, 0.7))],
    }
    result = bench.compare_task("gym", curves)
    assert result.time_ratio == 10.0
    assert not result.is_not_worse
    # Without a gain of the rival, there is no score to reach.
    curves["trl"] = [make_curve(bench, 0, (480, 200, 0.25))]
    assert bench.compare_task("gym", curves).time_ratio is None


def test_compare_task_without_rival_or_common_seed_returns_none(bench: ModuleType) -> None:
    own, other = make_curve(bench, 0, (480, 200, 0.9)), make_curve(bench, 1, (480, 200, 0.9))
    assert bench.compare_task("gym", {"instar": [own], "baseline": [own]}) is None
    assert bench.compare_task("gym", {"instar": [own], "trl": [other]}) is None


def test_compute_metrics_counts_wins_and_takes_worst_values(bench: ModuleType) -> None:
    def compare(score: float, rival_score: float) -> Any:
        curves = {
            "trl": [make_curve(bench, 0, (480, 200, rival_score))],
            "instar": [make_curve(bench, 0, (100, 200, score), (480, 2000, score))],
        }
        return bench.compare_task("gym", curves)

    compute_metrics = load_part("report").compute_metrics
    metrics = compute_metrics([compare(0.9, 0.6), compare(0.99, 0.88), compare(0.59, 0.6)])
    assert (metrics["tasks"], metrics["not_worse"], metrics["clear_wins"]) == (3, 3, 1)
    assert metrics["time_ratio"] == 10.0
    assert metrics["sample_gain"] == pytest.approx(-0.01)
    assert metrics["worst_gap"] == pytest.approx(-0.01)
    assert compute_metrics([])["time_ratio"] is None


def test_json_has_metrics_comparisons_and_curves(bench: ModuleType) -> None:
    curves = {
        "trl": [make_curve(bench, 0, (480, 200, 0.6))],
        "instar": [make_curve(bench, 0, (480, 2000, 0.9))],
    }
    output = json.loads(json.dumps(bench.make_json({"gym": curves}, [bench.compare_task("gym", curves)])))
    assert (output["tasks"], output["clear_wins"]) == (1, 1)
    assert output["comparisons"][0]["rival_score"] == 0.6
    final = output["curves"]["gym"]["instar"][0]["points"][-1]
    assert final == {"seconds": 480, "samples": 2000, "tokens": 20000, "score": 0.9}


def test_run_table_shows_unused_share(bench: ModuleType) -> None:
    curve = bench.Curve(0, make_curve(bench, 0, (480, 200, 0.9)).points, unused_share=0.25)
    table = bench.make_run_table({"gym": {"instar": [curve]}})
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["unused"] == ["25%"]


def test_draw_curves_writes_diagram(bench: ModuleType, tmp_path: Path) -> None:
    bench.draw_curves("gym", {"instar": [make_curve(bench, 0, (480, 200, 0.9))]}, tmp_path / "gym.png")
    assert (tmp_path / "gym.png").stat().st_size > 1000
