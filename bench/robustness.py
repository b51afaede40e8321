"""Train with many seeds and settings, and report the worst results.

    python bench/robustness.py [--suites demo,recipes,grid] [--seeds 10] [--parallel N] [--out FOLDER]
        [--set PATH=VALUE ...] [--json]

Every run has two CPU cores to itself; `--parallel` is the number of simultaneous runs, by default as many as
the machine has pairs of cores. All runs sample shuffled tasks. After a run, its last checkpoint and six
earlier ones are evaluated greedily in fp32, as in bench/learning.py.

- *demo*: the run of `instar demo` with `--seeds` seeds. ``demo_worst_gain`` is the smallest difference
  between the final and the untrained score, ``demo_worst`` the lowest final score, ``demo_median`` the median
  of the final scores and ``demo_seconds`` the longest training time.
- *recipes*: recipes/gsm8k.yaml with its agent and with the agent that answers in one turn, three seeds each.
  ``recipes_worst`` is the lowest final score. ``recipes_no_signal`` is the largest share of groups without
  signal in the steps of a run before its score reaches 0.85.
- *grid*: the development task of bench/learning.py for 180 s, with learning rates from 3e-5 to 1e-3 and 2 to
  12 groups per step. ``grid_worst_drop`` is the largest difference between the best and the final score of a
  run.
- *quick*: a run of 20 s, only to check that the bench works.

`--set` changes a setting of all runs, to compare it with the default; use another `--out` for them.

Every run has a folder in `--out` (default: .cache/bench/robustness) with its settings, scores and
`result.json`. Finished runs are not repeated, so the same command continues after an interruption; a run with
other settings is an error. Remove the folder of a run to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import yaml
from gateway_parts.processes import MeasurementError, read_log_tail
from learning_parts.evaluation import evaluate_run
from learning_parts.idle_check import check_idle
from learning_parts.instar_run import NEVER, RUN_FOLDER, run_instar
from learning_parts.report import Curve, Point, find_time_to_score
from learning_parts.results import Json, RunFolder, select_steps
from learning_parts.tasks import TASKS, LearningTask
from reliability_parts.state_file import CACHE
from rich.console import Console
from rich.table import Table

import instar.demo
from instar.cli.config_file import apply_overrides
from instar.config import RunConfig
from instar.trainer.monitor import read_steps

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_CONFIG = Path(instar.demo.__file__).with_name("run.yaml")
GSM8K_RECIPE = REPOSITORY / "recipes" / "gsm8k.yaml"
DEFAULT_SUITES = ("demo", "recipes", "grid")
SUITES = (*DEFAULT_SUITES, "quick")
RECIPE_SEEDS = range(3)
LEARNING_RATES = (3e-5, 1e-4, 3e-4, 5e-4, 1e-3)
GROUPS_PER_STEP = (2, 6, 12)
GRID_SECONDS, QUICK_SECONDS = 180.0, 20.0
HELD_OUT_ITEMS, QUICK_ITEMS = 104, 8
"""The numbers of held-out tasks in an evaluation. The first one is that of the demo."""
SOLVED_SCORE = 0.85
CORES_PER_RUN = 2
STOP_SECONDS = 60.0
"""How long an interrupted run may take to stop its processes."""

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False)


@dataclass(frozen=True)
class Experiment:
    """One training run."""

    suite: str
    name: str
    """The name of the run's folder in that of the suite."""
    seed: int
    task: LearningTask
    settings: Json
    """The run config, without the settings that are the same for all runs."""
    items: int = HELD_OUT_ITEMS
    """The number of held-out tasks in an evaluation."""
    overrides: tuple[str, ...] = ()
    """Changes of settings, as PATH=VALUE."""

    @property
    def label(self) -> str:
        return f"{self.suite}/{self.name}"

    def make_config(self) -> Json:
        """Return the run config. The bench evaluates the checkpoints itself, so all adapters are kept. A run
        without a number of steps is limited by time."""
        common = {
            "name": "robustness",
            "dir": RUN_FOLDER,
            "seed": self.seed,
            "trainer": {
                "checkpoint_every": NEVER,
                "keep_checkpoints": NEVER,
                "tensorboard": False,
            },
            "rollout": {"shuffle": True},
            "eval": None,
            "sync": {"route": "files"},
        }
        config = merge(merge({"trainer": {"steps": NEVER}}, self.settings), common)
        return apply_overrides(config, self.overrides)

    def make_complete_config(self) -> Json:
        """Return the run config with Instar's defaults. It identifies the run."""
        return RunConfig.model_validate(self.make_config()).model_dump(mode="json")

    def get_folder(self, out: Path) -> RunFolder:
        return RunFolder(out / self.suite / self.name)


@dataclass(frozen=True)
class Result:
    """What a finished run shows. ``scores`` are the held-out scores by seconds of training."""

    suite: str
    name: str
    scores: list[tuple[float, float]]
    steps: int
    samples: int
    no_signal: float | None
    """The share of groups without signal before the score reached SOLVED_SCORE. None if there are none."""

    @property
    def untrained(self) -> float:
        return self.scores[0][1]

    @property
    def final(self) -> float:
        return self.scores[-1][1]

    @property
    def best(self) -> float:
        return max(score for _, score in self.scores)

    @property
    def seconds(self) -> float:
        return self.scores[-1][0]


def merge(base: Json, changes: Json) -> Json:
    """Return ``base`` with the values of ``changes``. Nested objects are merged."""
    merged = dict(base)
    for name, value in changes.items():
        old = base.get(name)
        merged[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def read_recipe(path: Path) -> tuple[LearningTask, Json]:
    """Return the task of a run config, and the config."""
    settings = yaml.safe_load(path.read_text())
    agent = settings["rollout"]["agent"]
    task = LearningTask(
        agent=agent["function"],
        agent_args=agent.get("args", {}),
        train=settings["rollout"]["tasks"],
        held_out=settings["eval"]["tasks"],
        reward=settings["reward"],
        max_context=settings["model"]["max_context"],
    )
    return task, settings


def list_experiments(
    suites: Sequence[str], demo_seeds: int, overrides: Sequence[str] = ()
) -> list[Experiment]:
    experiments = {
        "demo": make_demo_suite(demo_seeds),
        "recipes": make_recipe_suite(),
        "grid": make_grid(),
        "quick": make_quick_suite(),
    }
    return [replace(e, overrides=tuple(overrides)) for suite in suites for e in experiments[suite]]


def make_demo_suite(seeds: int) -> Iterator[Experiment]:
    task, settings = read_recipe(DEMO_CONFIG)
    for seed in range(seeds):
        yield Experiment("demo", f"seed-{seed}", seed, task, settings)


def make_recipe_suite() -> Iterator[Experiment]:
    task, settings = read_recipe(GSM8K_RECIPE)
    one_turn_task = replace(task, agent="instar.agents.gsm8k:solve_in_one_turn", reward={"type": "agent"})
    one_turn_settings = merge(settings, {"rollout": {"agent": {"function": one_turn_task.agent}}})
    one_turn_settings["reward"] = one_turn_task.reward
    for seed in RECIPE_SEEDS:
        yield Experiment("recipes", f"gsm8k-{seed}", seed, task, settings)
        yield Experiment("recipes", f"one-turn-{seed}", seed, one_turn_task, one_turn_settings)


def make_grid() -> Iterator[Experiment]:
    for rate in LEARNING_RATES:
        for groups in GROUPS_PER_STEP:
            trainer = {"seconds": GRID_SECONDS, "groups_per_step": groups, "adam": {"lr": rate}}
            yield make_development_run("grid", f"lr-{rate:g}-groups-{groups}", trainer)


def make_quick_suite() -> Iterator[Experiment]:
    trainer = {"seconds": QUICK_SECONDS, "groups_per_step": 1}
    yield replace(make_development_run("quick", "dev", trainer), items=QUICK_ITEMS)


def make_development_run(suite: str, name: str, trainer: Json) -> Experiment:
    task = TASKS["dev"]
    return Experiment(suite, name, 0, task, {**task.make_settings(), "trainer": trainer})


def run_experiment(experiment: Experiment, out: Path) -> None:
    """Train and evaluate in this process, unless that is done, and save the result."""
    folder, config = experiment.get_folder(out), experiment.make_config()
    if not folder.is_finished:
        folder.prepare(experiment.make_complete_config())
        checkpoints = run_instar(config, config["trainer"]["seconds"], folder.path)
        folder.save_checkpoints(checkpoints, 0.0)
    checkpoints = folder.read_checkpoints()
    steps = select_steps(checkpoints, [])
    evaluate_run(experiment.task, folder, [0, *steps], experiment.items, experiment.label, log)
    scores = folder.read_scores()
    points = [Point(0.0, 0, 0, scores[0].score)]
    points += [
        Point(c.seconds, c.samples, c.tokens, scores[c.step].score) for c in checkpoints if c.step in scores
    ]
    records = read_steps(folder.path / RUN_FOLDER)
    result = Result(
        suite=experiment.suite,
        name=experiment.name,
        scores=[(round(point.seconds, 1), point.score) for point in points],
        steps=len(checkpoints),
        samples=checkpoints[-1].samples,
        no_signal=compute_share_without_signal(records, Curve(experiment.seed, points)),
    )
    (folder.path / "result.json").write_text(json.dumps(asdict(result)))
    folder.remove_other_adapters(steps)


def compute_share_without_signal(steps: Sequence[Json], curve: Curve) -> float | None:
    """Return the share of groups without signal in the steps until the curve reached SOLVED_SCORE."""
    solved_at = find_time_to_score([curve], SOLVED_SCORE)
    early = [step for step in steps if solved_at is None or step["elapsed"] <= solved_at]
    groups = sum(step.get("groups", 0) for step in early)
    return sum(step.get("zero_signal", 0) for step in early) / groups if groups else None


def read_result(experiment: Experiment, out: Path) -> Result | None:
    """Return the result of a finished run. Raises MeasurementError if it was started with other settings."""
    folder = experiment.get_folder(out)
    if folder.is_finished:
        folder.check_settings(experiment.make_complete_config())
    path = folder.path / "result.json"
    return Result(**json.loads(path.read_text())) if path.is_file() else None


def run_missing(experiments: Sequence[Experiment], options: argparse.Namespace) -> list[str]:
    """Run each experiment that has no result in a process with cores of its own. Return the failed ones."""
    missing = [e for e in experiments if read_result(e, options.out) is None]
    free_cores: SimpleQueue[str] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    for number in range(options.parallel):
        free_cores.put(",".join(map(str, cores[CORES_PER_RUN * number : CORES_PER_RUN * (number + 1)])))
    processes: list[subprocess.Popen[bytes]] = []
    failures: list[str] = []

    def run(experiment: Experiment) -> None:
        own_cores = free_cores.get()
        folder = options.out / experiment.suite
        folder.mkdir(parents=True, exist_ok=True)
        log_path = folder / f"{experiment.name}.log"
        command = [sys.executable, __file__, "--only", experiment.label, "--out", str(options.out)]
        command += [f"--set={override}" for override in experiment.overrides]
        log(f"{experiment.label}: training for {experiment.make_config()['trainer']['seconds']:.0f} s")
        with log_path.open("w") as output:
            process = subprocess.Popen(
                ["taskset", "-c", own_cores, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes.append(process)
            code = process.wait()
        free_cores.put(own_cores)
        result = read_result(experiment, options.out)
        if code != 0 or result is None:
            failures.append(experiment.label)
            log(f"{experiment.label} failed with code {code}: {read_log_tail(log_path)}")
        else:
            log(f"{experiment.label}: {result.untrained:.2f} → {result.final:.2f}, best {result.best:.2f}")

    with ThreadPoolExecutor(options.parallel) as executor:
        try:
            for future in [executor.submit(run, experiment) for experiment in missing]:
                future.result()
        except KeyboardInterrupt:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(STOP_SECONDS)
            raise
    return failures


def compute_metrics(results: Sequence[Result]) -> Json:
    """Return the worst figures of every suite that has results."""
    suites = {suite: [result for result in results if result.suite == suite] for suite in SUITES}
    metrics: Json = {"runs": len(results)}
    if demo := suites["demo"]:
        metrics["demo_worst_gain"] = min(result.final - result.untrained for result in demo)
        metrics["demo_worst"] = min(result.final for result in demo)
        metrics["demo_median"] = statistics.median(result.final for result in demo)
        metrics["demo_seconds"] = max(result.seconds for result in demo)
    if recipes := suites["recipes"]:
        metrics["recipes_worst"] = min(result.final for result in recipes)
        metrics["recipes_no_signal"] = max(result.no_signal or 0.0 for result in recipes)
    if grid := suites["grid"]:
        metrics["grid_worst_drop"] = max(result.best - result.final for result in grid)
    return metrics


def make_table(results: Sequence[Result]) -> Table:
    table = Table("run", "untrained", "best", "final", "steps", "samples", "seconds", "without signal")
    for r in results:
        scores = [f"{score:.3f}" for score in (r.untrained, r.best, r.final)]
        no_signal = "—" if r.no_signal is None else f"{r.no_signal:.0%}"
        table.add_row(
            f"{r.suite}/{r.name}", *scores, str(r.steps), str(r.samples), f"{r.seconds:.0f}", no_signal
        )
    return table


def parse_options() -> argparse.Namespace:
    available = len(os.sched_getaffinity(0)) // CORES_PER_RUN
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suites", default=",".join(DEFAULT_SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of the demo")
    parser.add_argument("--parallel", type=int, default=max(1, available), help="simultaneous runs")
    parser.add_argument("--out", type=Path, default=CACHE / "robustness")
    parser.add_argument(
        "--set", dest="overrides", metavar="PATH=VALUE", action="append", default=[], help="change a setting"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON line at the end")
    parser.add_argument("--only", help="run one experiment in this process, such as demo/seed-0")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.suites = options.suites.split(",")
    for name in options.suites:
        if name not in SUITES:
            parser.error(f"--suites: unknown name {name!r}; choose from {', '.join(SUITES)}")
    if not 1 <= options.parallel <= max(1, available):
        parser.error(f"--parallel: must be between 1 and {max(1, available)}, got {options.parallel}")
    if shutil.which("taskset") is None:
        parser.error("this bench needs the program taskset, which gives every run its own cores")
    return options


def run_only(label: str, options: argparse.Namespace) -> None:
    """Run one experiment. SIGTERM stops its processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    experiments = {e.label: e for e in list_experiments(SUITES, options.seeds, options.overrides)}
    if label not in experiments:
        raise MeasurementError(f"--only: unknown experiment {label!r}; choose from {', '.join(experiments)}")
    run_experiment(experiments[label], options.out)


def main() -> None:
    options = parse_options()
    try:
        if options.only:
            run_only(options.only, options)
            return
        check_idle()
        experiments = list_experiments(options.suites, options.seeds, options.overrides)
        failures = run_missing(experiments, options)
    except MeasurementError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues after the finished runs")
    results = [result for e in experiments if (result := read_result(e, options.out)) is not None]
    console.print(make_table(results))
    metrics = compute_metrics(results)
    log(", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
    if options.json:
        print(json.dumps({**metrics, "results": [asdict(result) for result in results]}))
    if failures:
        sys.exit(f"failed runs: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
