"""Compare `trainer.mode: async` with `sync`, using the same agents, samples, engine and trainer.

    python bench/async.py [--device cpu|gpu] [--json] [--out FILE] [--only sync|async] [--steps N] [--scale S]

The benchmark runs `instar train` twice, with YAML files that differ only in `trainer.mode`,
`trainer.max_staleness` and the run's name and folder. The agents replay bench/workloads/agents.jsonl (see the
README there) in shortened time. `mode: sync` starts all sessions of a step together and trains when the last
one has ended; `async` keeps sampling while the trainer works.

With `--device gpu`, vLLM and the trainer share a GPU and use SmolLM2. With `--device cpu`, the local engine
runs a tiny model with random weights.

`samples_per_hour` is measured from the moment the trainer is ready to the end of the last step. This
includes the start, when there is nothing to train on yet, and the end, when no further sessions are started.
`bound` is the upper bound that `instar simulate --from` computes from the async run for any schedule with
the same engine, trainer and number of concurrent sessions, and `of_bound` the fraction of it that async
reached. `predicted` is the simulator's result for each run, based on measurements from that run.
`reward_sync` and `reward_async` are the rewards on held-out tasks after training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_parts.runs import Mode, RunPlan, run_training, scale_workload
from rich.console import Console
from rich.table import Table

from instar.cli.config_file import load_config
from instar.cli.simulate import cluster_from_config, load_workload, result_json
from instar.conformance.tiny import make_tiny_model
from instar.simulate.bound import compute_upper_bound
from instar.simulate.pipeline import simulate
from instar.simulate.sessions import read_workload, write_workload

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "agents.jsonl"
REWARD_NOISE_FACTOR = 3.0
"""Two rewards count as equal if they differ by at most this many standard errors."""

console = Console(stderr=True)

GPU_PLAN = RunPlan(
    engine={"type": "vllm", "policy": "merged", "max_batch": 32, "gpu_memory": 0.4},
    model={"name": "smollm2-135m", "dtype": "bf16"},
    backend={"type": "local", "lora": {"rank": 16, "alpha": 32}},
    characters="digits",
    lr=3e-5,
    steps=64,
    group_size=4,
    groups_per_step=8,
    concurrency=32,
    max_staleness=8,
    scale=1 / 450,
    speed=250.0,
    context=8192,
    eval_tasks=128,
    timeout_seconds=570.0,
)
CPU_PLAN = RunPlan(
    engine={"type": "local", "threads": 1, "max_batch": 64},
    model={"name": "", "dtype": "fp32", "device": "cpu"},
    backend={"type": "local", "threads": 1, "lora": {"rank": 8, "alpha": 16}},
    characters="letters and digits",
    lr=2e-2,
    steps=24,
    group_size=4,
    groups_per_step=4,
    concurrency=16,
    max_staleness=8,
    scale=1 / 90,
    speed=60.0,
    context=4096,
    eval_tasks=128,
    timeout_seconds=540.0,
)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def make_plan(arguments: argparse.Namespace, folder: Path) -> RunPlan:
    plan = GPU_PLAN if arguments.device == "gpu" else CPU_PLAN
    if arguments.device == "cpu":
        model = make_tiny_model(folder / "model", hidden=32, context=plan.context)
        plan = replace(plan, model={**plan.model, "name": str(model)})
    if arguments.model:
        plan = replace(plan, model={**plan.model, "name": arguments.model})
    if arguments.engine:
        plan = replace(plan, engine={**plan.engine, **json.loads(arguments.engine)})
    overrides = {
        name: value
        for name in ("steps", "scale", "concurrency", "max_staleness", "speed", "timeout_seconds")
        if (value := getattr(arguments, name)) is not None
    }
    return replace(plan, **overrides)


def predict_run(folder: Path, mode: Mode) -> dict[str, Any]:
    """Return the simulator's result for a run, based on measurements from that run."""
    config = load_config(folder / f"{mode}.yaml")
    workload = asyncio.run(load_workload(config, measured_run=folder / mode, seed=config.seed))
    cluster = cluster_from_config(config)
    return result_json(
        simulate(workload, cluster, seed=config.seed), compute_upper_bound(workload, cluster), None, cluster
    )


def measure(plan: RunPlan, folder: Path, only: str | None, seed: int, out: Path | None) -> dict[str, Any]:
    workload = folder / "workload.jsonl"
    write_workload(workload, scale_workload(read_workload(WORKLOAD), plan))
    runs = load_previous_runs(out) if only else {}
    modes: tuple[Mode, ...] = ("sync", "async")
    for mode in modes:
        if only not in (None, mode):
            continue
        log(f"{mode}: {plan.steps} steps of {plan.groups_per_step} groups of {plan.group_size} sessions")
        runs[mode] = run_training(plan, mode, folder, workload, seed)
        runs[mode]["predicted"] = predict_run(folder, mode)
        log(f"{mode}: {runs[mode]['samples']} samples in {runs[mode]['seconds']:.1f} s")
        if out is not None:
            out.write_text(json.dumps({"runs": runs}))  # keep this result if the next run fails
    return runs


def load_previous_runs(out: Path | None) -> dict[str, Any]:
    """Return the runs in the output file, so that `--only` can measure one mode at a time."""
    return json.loads(out.read_text())["runs"] if out is not None and out.is_file() else {}


def summarize(runs: dict[str, Any]) -> dict[str, Any]:
    """Return metrics that compare the two runs, with the runs themselves under `runs`."""
    result: dict[str, Any] = {"runs": runs}
    async_run, sync_run = runs.get("async"), runs.get("sync")
    if async_run:
        bound = async_run["predicted"]["bound"]
        result |= {
            "bound": bound,
            "bound_by": async_run["predicted"]["bound_by"],
            "of_bound": async_run["samples_per_hour"] / bound,
            "reward_async": async_run["reward"],
        }
    if sync_run:
        result["reward_sync"] = sync_run["reward"]
    if async_run and sync_run:
        noise = REWARD_NOISE_FACTOR * math.hypot(async_run["reward_error"], sync_run["reward_error"])
        result |= {
            "speedup": async_run["samples_per_hour"] / sync_run["samples_per_hour"],
            "reward_noise": noise,
            "reward_same": abs(async_run["reward"] - sync_run["reward"]) <= noise,
            "samples_same": async_run["samples"] / sync_run["samples"],
            "prediction_error": {
                mode: runs[mode]["predicted"]["samples_per_hour"] / runs[mode]["samples_per_hour"] - 1
                for mode in ("sync", "async")
            },
        }
    return result


def show_tables(result: dict[str, Any]) -> None:
    runs = result["runs"]
    table = Table("", *runs)
    rows = {
        "samples per hour": "samples_per_hour",
        "duration (s)": "seconds",
        "samples": "samples",
        "idle fraction of the trainer": "trainer_idle",
        "training seconds per step": "train_seconds",
        "mean staleness": "staleness_mean",
        "dropped as stale": "stale_dropped",
        "reward before": "reward_before",
        "reward after": "reward",
    }
    for name, key in rows.items():
        values = [runs[mode][key] for mode in runs]
        table.add_row(name, *("–" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values))
    predicted = [f"{runs[mode]['predicted']['samples_per_hour']:,.0f}" for mode in runs]
    table.add_row("predicted samples per hour", *predicted)
    console.print(table)
    if "speedup" in result:
        console.print(
            f"async is {result['speedup']:.2f} times as fast as sync and reaches {result['of_bound']:.0%} of "
            f"the upper bound ({result['bound']:,.0f} samples per hour, limited by {result['bound_by']})",
            highlight=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the async and sync training modes.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object at the end")
    parser.add_argument("--out", type=Path, help="output file, written after each run")
    parser.add_argument(
        "--only",
        choices=("sync", "async"),
        help="measure only this mode; use the other mode's result in --out if there is one",
    )
    parser.add_argument("--folder", type=Path, help="folder in which to keep the runs")
    parser.add_argument("--model", help="name or folder of the model to use")
    parser.add_argument("--engine", help="additional engine settings as JSON")
    parser.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--scale", type=float, help="factor by which the workload's times are multiplied")
    parser.add_argument(
        "--speed", type=float, help="decode speed of a reply on this engine, in tokens per second"
    )
    parser.add_argument("--concurrency", type=int, help="number of concurrent sessions")
    parser.add_argument("--max-staleness", type=int, help="trainer.max_staleness of the async run")
    parser.add_argument(
        "--limit", dest="timeout_seconds", type=float, help="time limit for each run, in seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        plan = make_plan(arguments, folder)
        try:
            runs = measure(plan, folder, arguments.only, arguments.seed, arguments.out)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        result = summarize(runs)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result))
    show_tables(result)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
