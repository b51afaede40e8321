"""Compare training settings: train many LoRA adapters at once, with GRPO on small tasks, on one GPU.

    python bench/ablations.py --set first [--task calc|cmd|tools] [--steps 60] [--seconds S] [--every 10]
        [--held-out 200] [--model FOLDER] [--out FOLDER] [--json]

An experiment is a setting with a seed, and a set is a list of experiments
(`ablation_parts/experiments.py`). All experiments of a set train in one batch, each with its own adapter,
on one task after the other. ``at 500`` and ``at 1,500`` are the greedy scores on held-out questions in the
last evaluation with at most that many training samples, and ``at end`` those in the last evaluation.
``entropy`` (in nats per token) and ``signal`` (the number of groups per step whose rewards differ) are means
over the last ten steps. Each cell has one value per seed and their mean. An experiment's initial adapter and
its samples depend on its position in the set, so results can be reproduced only with the complete set.
Without a GPU, training runs on the CPU in fp32, which is fast enough only for tests.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ablation_parts.experiments import EXPERIMENT_SETS
from ablation_parts.model import choose_device
from ablation_parts.tasks import TASKS
from ablation_parts.training import (
    EVALUATION_INTERVAL,
    HELD_OUT_EXAMPLES,
    Curves,
    ExperimentBatch,
    run_experiments,
)
from rich.console import Console
from rich.table import Table

from instar.errors import ConfigError
from instar.models import DEFAULT_MODEL, resolve_model

LAST_STEPS = 10
FILE_WIDTH = 160
"""The width of the tables if the output is not a terminal."""
console = Console(stderr=True, width=None if sys.stderr.isatty() else FILE_WIDTH)


@dataclass(frozen=True)
class SettingResult:
    """The metrics of one setting. Every list has one value per seed."""

    setting: str
    seeds: list[int]
    score_500: list[float]
    score_1500: list[float]
    score_end: list[float]
    score_best: list[float]
    """The highest score of all evaluations."""
    entropy: list[float]
    groups_with_signal: list[float]


def get_score_at(curves: Curves, samples: int) -> float:
    """Return the score in the last evaluation with at most this number of training samples."""
    evaluations = [evaluation for evaluation in curves.evaluations if evaluation.samples <= samples]
    return max(evaluations, key=lambda evaluation: evaluation.samples).score


def summarize(experiments: Sequence[Curves]) -> list[SettingResult]:
    """Return the results by setting, in the order of the experiments."""
    by_setting: dict[str, list[Curves]] = {}
    for curves in experiments:
        by_setting.setdefault(curves.settings.describe(), []).append(curves)
    return [
        SettingResult(
            setting=setting,
            seeds=[curves.settings.seed for curves in runs],
            score_500=[get_score_at(curves, 500) for curves in runs],
            score_1500=[get_score_at(curves, 1500) for curves in runs],
            score_end=[curves.evaluations[-1].score for curves in runs],
            score_best=[max(evaluation.score for evaluation in curves.evaluations) for curves in runs],
            entropy=[statistics.fmean(curves.entropy[-LAST_STEPS:]) for curves in runs],
            groups_with_signal=[statistics.fmean(curves.groups_with_signal[-LAST_STEPS:]) for curves in runs],
        )
        for setting, runs in by_setting.items()
    ]


def format_cell(values: Sequence[float], digits: int) -> str:
    """Return one value per seed, and their mean in parentheses."""
    return " ".join(
        [*(f"{value:.{digits}f}" for value in values), f"({statistics.fmean(values):.{digits}f})"]
    )


def show(task: str, results: Sequence[SettingResult]) -> None:
    table = Table(title=f"{task}: scores by seed, and their mean")
    table.add_column("setting")
    table.add_column("seeds")
    for title in ("at 500", "at 1,500", "at end", "entropy", "signal"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.setting,
            " ".join(map(str, result.seeds)),
            format_cell(result.score_500, 2),
            format_cell(result.score_1500, 2),
            format_cell(result.score_end, 2),
            format_cell(result.entropy, 2),
            format_cell(result.groups_with_signal, 1),
        )
    console.print(table)


def measure(task: str, options: argparse.Namespace, model: Path) -> list[SettingResult]:
    """Train the experiments of the set on a task, and write their curves to ``options.out`` if it is set."""
    settings, device = EXPERIMENT_SETS[options.set], choose_device()
    batch = ExperimentBatch(model, TASKS[task], settings, device, options.held_out)
    curves = run_experiments(batch, options.steps, options.seconds, console.print, options.every)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{task}.json").write_text(json.dumps([asdict(item) for item in curves]))
    return summarize(curves)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--set", required=True, choices=list(EXPERIMENT_SETS), help="set of experiments to run"
    )
    parser.add_argument("--task", choices=list(TASKS), help="run only this task (default: all)")
    parser.add_argument("--steps", type=int, default=60, help="number of training steps per task")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit per task, in seconds")
    parser.add_argument("--every", type=int, default=EVALUATION_INTERVAL, help="steps between evaluations")
    parser.add_argument(
        "--held-out", type=int, default=HELD_OUT_EXAMPLES, help="number of held-out questions"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"model folder (default: {DEFAULT_MODEL})")
    parser.add_argument("--out", type=Path, help="folder for the curves, one JSON file per task")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON line at the end")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    model = resolve_model(options.model)
    results: dict[str, list[SettingResult]] = {}
    for task in [options.task] if options.task else TASKS:
        results[task] = measure(task, options, model)
        show(task, results[task])
        # The adapters and the optimizer of this task would otherwise stay on the GPU during the next one.
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        tasks = {task: [asdict(result) for result in rows] for task, rows in results.items()}
        print(json.dumps({"set": options.set, "tasks": tasks}))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
