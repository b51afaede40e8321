"""Compare how fast and how well Instar and TRL's GRPOTrainer learn the same tasks in the same time.

    python bench/learning.py [--tasks gsm8k,gym] [--contenders instar,trl] [--seeds 0,1,2] [--seconds 480]
        [--held-out 400] [--baseline-python PYTHON] [--trl-python PYTHON] [--out FOLDER] [--json] [--quick]
    python bench/learning.py --gpu [the same options]
    python bench/learning.py --sweep [--gpu] [--seeds 0] [--seconds 480] [--held-out 400] [--json]

All contenders train the default model with LoRA of rank 16 and alpha 32 on the same tasks, with the same
agents, rewards, group size and sampling (see learning_parts/tasks.py), one after the other, so that each has
the machine to itself; before each run, the bench checks that it is idle. Instar runs with its default
settings. TRL is installed from PyPI into an environment of its own, unless `--trl-python` is the interpreter
of an environment that has TRL 1.16 and Instar. Its learning rate, batch size, precision and further options
are `TRL_SETTINGS` in learning_parts/trl_run.py. They are to be chosen with `--sweep`, which trains TRL on the
development task `dev` with each of the settings in `SWEEP` and writes the scores to `sweep.json` in `--out`.
The learning rate is constant, and gradient checkpointing, which only costs time, is off. All other options
that affect learning are TRL's defaults. TRL's AsyncGRPO needs a vLLM server and is therefore not compared on
a CPU. The contender `baseline` is an older release of Instar, run with `--baseline-python` on the first seed;
it appears in the tables and diagrams, but not in the metrics.

With `--gpu`, both contenders train on one GPU and sample on it with vLLM from the environment of TRL, which
gets the same share of the GPU's memory. Instar starts a vLLM server, and TRL runs vLLM in its own process
(`colocate`). TRL trains with bf16 autocast, its default on a GPU, and computes a step in one pass. The
default tasks are `gsm8k` and `calculator`.

The time includes generation and training, but not startup and, for TRL, not saving. vLLM is part of startup.
If Instar samples before its clock starts, this time is added. A step that has started when the time is over
still counts.

One evaluator loads the saved adapters into the local engine in fp32 and runs `--held-out` tasks greedily: for
the last checkpoint, for six earlier ones, and for Instar's checkpoint at the other contender's number of
samples. The metrics compare Instar with the best other contender:

- ``tasks``: the number of compared tasks.
- ``not_worse``: the tasks in which the mean final score is at most 0.02 below the other's.
- ``clear_wins``: the tasks in which the other ends below 0.85 and Instar's mean is higher by at least 0.1.
- ``time_ratio``: the time until Instar's mean curve first reaches the other's final score, relative to the
  time until the other's mean curve first reaches it, in the worst of the tasks in which the other gained at
  least 0.1; 10 if it is never reached.
- ``sample_gain``: the difference in score at the other's number of samples, in the worst task.
- ``worst_gap``: the difference between Instar's worst seed and the other's mean, in the worst task.

`--json` also prints the comparison of each task and all curves. Every run has a folder in `--out` (default:
.cache/bench/learning, or learning-gpu), with its settings, checkpoints and scores. Finished runs and
evaluations are not repeated, so that an interrupted comparison continues where it stopped; a run with other
settings is an error. Remove the folder of a run to repeat it. As soon as all contenders of a seed have
finished, only evaluated adapters are kept, so run all contenders of a comparison with one command: later,
Instar's checkpoint at another number of samples may be gone, which is an error. `--out` also gets one diagram
per task.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from gateway_parts.processes import MeasurementError
from learning_parts.evaluation import evaluate_run
from learning_parts.idle_check import check_idle
from learning_parts.instar_run import compute_unused_share, make_run_settings, run_instar
from learning_parts.report import (
    BASELINE,
    INSTAR,
    Curve,
    Point,
    compare_task,
    draw_curves,
    make_comparison_table,
    make_json,
    make_run_table,
)
from learning_parts.results import Json, RunFolder, select_steps
from learning_parts.tasks import COMPARISON_TASKS, GPU_TASKS, HELD_OUT_SIZE, TASKS
from learning_parts.trl_run import TRL_SETTINGS, TrlSettings, install_trl, make_sweep, run_trl
from reliability_parts.state_file import CACHE
from rich.console import Console
from rich.table import Table

from instar.config import RunConfig

CONTENDERS = ("trl", BASELINE, INSTAR)
"""Instar is last, because it is evaluated at the others' numbers of samples."""
QUICK = {"tasks": "gsm8k", "seeds": "0", "seconds": 20.0, "held_out": 8}

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False)


class Comparison:
    """Runs and evaluates the missing parts of a comparison."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._trl_settings = TRL_SETTINGS.adapt_to_gpu() if options.gpu else TRL_SETTINGS
        self.failures: list[str] = []

    def get_folder(self, task: str, contender: str, seed: int) -> RunFolder:
        return RunFolder(self._options.out / task / f"{contender}-{seed}")

    def _get_untrained_folder(self, task: str) -> RunFolder:
        return RunFolder(self._options.out / task / "untrained")

    def _make_run_settings(self, task: str, seed: int) -> Json:
        vllm_python = self._options.trl_python if self._options.gpu else None
        return make_run_settings(TASKS[task], seed, self._options.seconds, vllm_python)

    def make_settings(self, task: str, contender: str, seed: int, trl: TrlSettings | None = None) -> Json:
        """Return the settings that a finished run must have to be used again. Those of Instar include its
        defaults."""
        settings = self._make_run_settings(task, seed)
        if contender == INSTAR:
            return RunConfig.model_validate(settings).model_dump(mode="json")
        if contender == BASELINE:
            return {**settings, "python": self._options.baseline_python}
        trl = trl or self._trl_settings
        return {**TASKS[task].make_settings(), "seconds": self._options.seconds, **asdict(trl)}

    def ensure_run(self, task: str, contender: str, seed: int, trl: TrlSettings | None = None) -> bool:
        """Train unless the run has already finished. Return False if it fails. Every contender except Instar
        and its baseline is TRL with the settings ``trl``, by default those of the comparison."""
        folder = self.get_folder(task, contender, seed)
        seconds = self._options.seconds
        settings = self.make_settings(task, contender, seed, trl)
        if folder.is_finished:
            folder.check_settings(settings)
            return True
        label = f"{task}, {contender}, seed {seed}"
        if not self._options.quick:
            check_idle()
        log(f"{label}: training for {seconds:.0f} s")
        folder.prepare(settings)
        try:
            if contender in (INSTAR, BASELINE):
                python = sys.executable if contender == INSTAR else self._options.baseline_python
                run_settings = self._make_run_settings(task, seed)
                checkpoints = run_instar(run_settings, seconds, folder.path, python)
            else:
                trl, python = trl or self._trl_settings, self._options.trl_python
                checkpoints = run_trl(task, seed, seconds, folder.path, trl, python)
        except MeasurementError as error:
            log(f"{label} failed: {error}")
            self.failures.append(label)
            return False
        final = checkpoints[-1]
        folder.save_checkpoints(checkpoints, compute_unused_share(folder.path, final.samples))
        log(f"{label}: {len(checkpoints)} steps, {final.samples} samples, {final.seconds:.0f} s")
        return True

    def evaluate_seed(self, task: str, contenders: Sequence[str], seed: int) -> None:
        """Evaluate the finished runs of a task with one seed. Remove the other adapters, unless a run failed:
        when it is repeated, Instar is evaluated at its number of samples."""
        items = self._options.held_out
        evaluate_run(TASKS[task], self._get_untrained_folder(task), [0], items, f"{task}, untrained", log)
        folders = {name: self.get_folder(task, name, seed) for name in contenders}
        finished = {name: folder for name, folder in folders.items() if folder.is_finished}
        rivals = [folder for name, folder in finished.items() if name not in (INSTAR, BASELINE)]
        rival_samples = [folder.read_checkpoints()[-1].samples for folder in rivals]
        for name, folder in finished.items():
            steps = select_steps(folder.read_checkpoints(), rival_samples if name == INSTAR else [])
            evaluate_run(TASKS[task], folder, steps, items, f"{task}, {name}, seed {seed}", log)
        if len(finished) == len(contenders):
            for folder in finished.values():
                folder.remove_other_adapters(set(folder.read_scores()))

    def evaluate_final(self, task: str, contender: str, seed: int) -> None:
        """Evaluate the last checkpoint of a finished run and the untrained model."""
        folder, items = self.get_folder(task, contender, seed), self._options.held_out
        final = folder.read_checkpoints()[-1].step
        evaluate_run(TASKS[task], self._get_untrained_folder(task), [0], items, f"{task}, untrained", log)
        evaluate_run(TASKS[task], folder, [final], items, f"{task}, {contender}, seed {seed}", log)
        folder.remove_other_adapters({final})

    def load_curve(self, task: str, contender: str, seed: int) -> Curve | None:
        """Return the curve of a run, or None if it is not finished or not evaluated."""
        folder = self.get_folder(task, contender, seed)
        untrained = self._get_untrained_folder(task).read_scores()
        scores, checkpoints = folder.read_scores(), folder.read_checkpoints()
        if not (checkpoints and checkpoints[-1].step in scores and untrained):
            return None
        points = [
            Point(c.seconds, c.samples, c.tokens, scores[c.step].score)
            for c in checkpoints
            if c.step in scores
        ]
        return Curve(seed, [Point(0.0, 0, 0, untrained[0].score), *points], folder.read_unused_share())

    def load_curves(self, task: str, contender: str) -> list[Curve]:
        curves = (self.load_curve(task, contender, seed) for seed in self._options.seeds)
        return [curve for curve in curves if curve is not None]


def run_comparison(comparison: Comparison, options: argparse.Namespace) -> Json:
    """Run all missing parts, and show and return the results. A failed run is left out."""
    if "trl" in options.contenders or options.gpu:
        ensure_trl(options)
    for seed in options.seeds:
        contenders = select_contenders(options, seed)
        for task in options.tasks:
            for contender in contenders:
                comparison.ensure_run(task, contender, seed)
            comparison.evaluate_seed(task, contenders, seed)
    results = {
        task: {contender: comparison.load_curves(task, contender) for contender in options.contenders}
        for task in options.tasks
    }
    for task, curves in results.items():
        draw_curves(task, curves, options.out / f"{task}.png")
    comparisons = [c for task, curves in results.items() if (c := compare_task(task, curves)) is not None]
    console.print(make_run_table(results), make_comparison_table(comparisons))
    log(f"the diagrams are in {options.out}")
    return make_json(results, comparisons)


def ensure_trl(options: argparse.Namespace) -> None:
    """Install TRL, which includes vLLM on a GPU, unless `--trl-python` is set."""
    if options.trl_python is None:
        options.trl_python = install_trl(log, on_gpu=options.gpu)


def select_contenders(options: argparse.Namespace, seed: int) -> list[str]:
    """Return the contenders that run with the seed. The baseline only runs with the first one."""
    return [name for name in options.contenders if name != BASELINE or seed == options.seeds[0]]


def run_sweep(comparison: Comparison, options: argparse.Namespace) -> Json:
    """Train TRL on the development task with each of the settings. Show, save and return the results."""
    ensure_trl(options)
    sweep = make_sweep(on_gpu=options.gpu)
    for name, settings in sweep.items():
        contender = make_sweep_contender(name)
        for seed in options.seeds:
            if comparison.ensure_run("dev", contender, seed, settings):
                comparison.evaluate_final("dev", contender, seed)
    results = collect_sweep(comparison, sweep)
    (options.out / "sweep.json").write_text(json.dumps(results, indent=1))
    table = Table("settings", "final score, mean", "by seed", "steps", "samples")
    for name, result in results.items():
        scores = result["scores"]
        mean = f"{sum(scores) / len(scores):.3f}" if scores else "failed"
        by_seed = " ".join(f"{score:.3f}" for score in scores)
        table.add_row(name, mean, by_seed, *(" ".join(map(str, result[key])) for key in ("steps", "samples")))
    console.print(table)
    return results


def make_sweep_contender(name: str) -> str:
    return "trl-" + re.sub(r"\W+", "-", name)


def collect_sweep(comparison: Comparison, sweep: Mapping[str, TrlSettings]) -> Json:
    """Return the final scores, steps and samples of the finished runs, as lists over the seeds, for each of
    the settings."""
    results: Json = {}
    for name, settings in sweep.items():
        contender = make_sweep_contender(name)
        curves = comparison.load_curves("dev", contender)
        runs = [comparison.get_folder("dev", contender, c.seed).read_checkpoints() for c in curves]
        results[name] = {
            "settings": asdict(settings),
            "seeds": [curve.seed for curve in curves],
            "scores": [curve.final.score for curve in curves],
            "steps": [len(checkpoints) for checkpoints in runs],
            "samples": [checkpoints[-1].samples for checkpoints in runs],
        }
    return results


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", default=",".join(COMPARISON_TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--contenders", default="instar,trl", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=480.0, help="training time of each run")
    parser.add_argument("--held-out", type=int, default=400, help=f"held-out tasks, up to {HELD_OUT_SIZE}")
    parser.add_argument(
        "--baseline-python",
        type=os.path.abspath,
        help="the interpreter of an environment with an older Instar",
    )
    parser.add_argument(
        "--trl-python",
        type=os.path.abspath,
        help="the interpreter of an environment with TRL 1.16 and Instar, and with vLLM for --gpu",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="train on a GPU and sample with vLLM, by default on two tasks"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON line at the end")
    parser.add_argument("--quick", action="store_true", help="run a tiny version, to check that it works")
    parser.add_argument(
        "--sweep", action="store_true", help="compare settings of TRL on the development task"
    )
    if parser.parse_args().gpu:
        parser.set_defaults(tasks=",".join(GPU_TASKS))
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    suffixes = [name for name in ("gpu", "quick") if getattr(options, name)]
    options.out = options.out or CACHE / "-".join(["learning", *suffixes])
    options.tasks = _parse_names(parser, "--tasks", options.tasks, list(TASKS))
    options.contenders = _parse_names(parser, "--contenders", options.contenders, list(CONTENDERS))
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    if not 0 < options.held_out <= HELD_OUT_SIZE:
        parser.error(f"--held-out: must be between 1 and {HELD_OUT_SIZE}, got {options.held_out}")
    if BASELINE in options.contenders and options.baseline_python is None:
        parser.error("--contenders: baseline needs --baseline-python with the interpreter of an older Instar")
    if options.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch finds no GPU")
    return options


def _parse_names(parser: argparse.ArgumentParser, option: str, text: str, allowed: list[str]) -> list[str]:
    """Return the names in the order of ``allowed``."""
    names = text.split(",")
    for name in names:
        if name not in allowed:
            parser.error(f"{option}: unknown name {name!r}; choose from {', '.join(allowed)}")
    return [name for name in allowed if name in names]


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(options)
    try:
        results = (run_sweep if options.sweep else run_comparison)(comparison, options)
        if options.json:
            print(json.dumps(results))
    except MeasurementError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues after the last finished part")
    if comparison.failures:
        sys.exit(f"failed runs: {'; '.join(comparison.failures)}")


if __name__ == "__main__":
    main()
