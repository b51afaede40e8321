"""Async against sync: the same agents, samples, engine and trainer, and what the modes make of them.

    python bench/async.py [--device cpu|gpu] [--json] [--out FILE] [--only sync|async] [--steps N] [--scale S]

Two whole runs of `instar train`, whose YAML differs in `trainer.mode` and `trainer.max_staleness` alone.
The agents play bench/workloads/agents.jsonl (its README says where that comes from) in shortened time. `mode:
sync` launches all sessions of a step at once and trains when the last one has ended; `async` runs ahead.

gpu: vLLM and the trainer on one GPU, SmolLM2. cpu: the local engine and a tiny model with random weights.

`samples_per_hour` counts from the moment the trainer is up to the end of the last step: the beginning, when
there is nothing to train on yet, and the end, when nothing is left to run ahead with, are in it. `bound` is
what `instar simulate --from` the async run says that no schedule could get past with the same engine, trainer
and number of sessions at once; `of_bound` is what async got of it. `predicted` is what the simulator makes of
each run from what was measured in it. `reward_sync` and `reward_async` are of held-out tasks, after training.
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

from async_parts.runs import Mode, Plan, run, scaled
from rich.console import Console
from rich.table import Table

from instar.cli.config_file import load_config
from instar.cli.simulate import cluster_from_config, load_workload, result_json
from instar.conformance.tiny import make_tiny_model
from instar.simulate.bound import upper_bound
from instar.simulate.pipeline import simulate
from instar.simulate.sessions import read_workload, write_workload

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "agents.jsonl"
NOISE = 3.0
"""Standard errors that two rewards may differ by."""

console = Console(stderr=True)

GPU = Plan(
    engine={"type": "vllm", "policy": "merged", "max_batch": 32, "gpu_memory": 0.4},
    model={"name": "smollm2-135m", "dtype": "bf16"},
    backend={"type": "local", "lora": {"rank": 16, "alpha": 32}},
    kind="digits",
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
    limit=570.0,
)
CPU = Plan(
    engine={"type": "local", "threads": 1, "max_batch": 64},
    model={"name": "", "dtype": "fp32", "device": "cpu"},
    backend={"type": "local", "threads": 1, "lora": {"rank": 8, "alpha": 16}},
    kind="letters and digits",
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
    limit=540.0,
)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def plan_of(arguments: argparse.Namespace, folder: Path) -> Plan:
    plan = GPU if arguments.device == "gpu" else CPU
    if arguments.device == "cpu":
        model = make_tiny_model(folder / "model", hidden=32, context=plan.context)
        plan = replace(plan, model={**plan.model, "name": str(model)})
    if arguments.model:
        plan = replace(plan, model={**plan.model, "name": arguments.model})
    if arguments.engine:
        plan = replace(plan, engine={**plan.engine, **json.loads(arguments.engine)})
    given = {
        name: value
        for name in ("steps", "scale", "concurrency", "max_staleness", "speed", "limit")
        if (value := getattr(arguments, name)) is not None
    }
    return replace(plan, **given)


def predict(folder: Path, mode: Mode) -> dict[str, Any]:
    """What the simulator makes of a run, from what was measured in it."""
    config = load_config(folder / f"{mode}.yaml")
    work = asyncio.run(load_workload(config, measured=folder / mode, seed=config.seed))
    plant = cluster_from_config(config)
    return result_json(simulate(work, plant, seed=config.seed), upper_bound(work, plant), None, plant)


def measure(plan: Plan, folder: Path, only: str | None, seed: int, out: Path | None) -> dict[str, Any]:
    workload = folder / "workload.jsonl"
    write_workload(workload, scaled(read_workload(WORKLOAD), plan))
    found = earlier(out) if only else {}
    modes: tuple[Mode, ...] = ("sync", "async")
    for mode in modes:
        if only not in (None, mode):
            continue
        log(f"{mode}: {plan.steps} steps of {plan.groups_per_step} groups of {plan.group_size} sessions")
        found[mode] = run(plan, mode, folder, workload, seed)
        found[mode]["predicted"] = predict(folder, mode)
        log(f"{mode}: {found[mode]['samples']} samples in {found[mode]['seconds']:.1f} s")
        if out is not None:
            out.write_text(json.dumps({"runs": found}))  # a later failure leaves what is known
    return found


def earlier(out: Path | None) -> dict[str, Any]:
    """The runs in the file, where one of them is measured after the other."""
    return json.loads(out.read_text())["runs"] if out is not None and out.is_file() else {}


def headline(found: dict[str, Any]) -> dict[str, Any]:
    """The figures that are asked for."""
    result: dict[str, Any] = {"runs": found}
    ahead, strict = found.get("async"), found.get("sync")
    if ahead:
        limit = ahead["predicted"]["bound"]
        result |= {
            "bound": limit,
            "bound_by": ahead["predicted"]["bound_by"],
            "of_bound": ahead["samples_per_hour"] / limit,
            "reward_async": ahead["reward"],
        }
    if strict:
        result["reward_sync"] = strict["reward"]
    if ahead and strict:
        noise = NOISE * math.hypot(ahead["reward_error"], strict["reward_error"])
        result |= {
            "speedup": ahead["samples_per_hour"] / strict["samples_per_hour"],
            "reward_noise": noise,
            "reward_same": abs(ahead["reward"] - strict["reward"]) <= noise,
            "samples_same": ahead["samples"] / strict["samples"],
            "prediction_error": {
                mode: found[mode]["predicted"]["samples_per_hour"] / found[mode]["samples_per_hour"] - 1
                for mode in ("sync", "async")
            },
        }
    return result


def show(result: dict[str, Any]) -> None:
    found = result["runs"]
    table = Table("", *found)
    rows = {
        "samples per hour": "samples_per_hour",
        "seconds": "seconds",
        "samples": "samples",
        "trainer idle": "trainer_idle",
        "seconds of a step": "train_seconds",
        "staleness, mean": "staleness_mean",
        "dropped as stale": "stale_dropped",
        "reward before": "reward_before",
        "reward after": "reward",
    }
    for name, key in rows.items():
        values = [found[mode][key] for mode in found]
        table.add_row(name, *("–" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values))
    predicted = [f"{found[mode]['predicted']['samples_per_hour']:,.0f}" for mode in found]
    table.add_row("predicted samples per hour", *predicted)
    console.print(table)
    if "speedup" in result:
        console.print(
            f"async is {result['speedup']:.2f} times sync, and {result['of_bound']:.0%} of what any schedule "
            f"could get ({result['bound']:,.0f} samples per hour, {result['bound_by']})",
            highlight=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure async against sync.")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    parser.add_argument("--out", type=Path, help="file for the figures, written after each run")
    parser.add_argument(
        "--only",
        choices=("sync", "async"),
        help="one of the runs; the other's figures are taken from --out, where they are there",
    )
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--model", help="folder or name of another model")
    parser.add_argument("--engine", help="further settings of the engine, as JSON")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--scale", type=float, help="of the workload's times")
    parser.add_argument("--speed", type=float, help="tokens per second of a reply here")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--max-staleness", type=int)
    parser.add_argument("--limit", type=float, help="seconds that one run may take")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        plan = plan_of(arguments, folder)
        try:
            found = measure(plan, folder, arguments.only, arguments.seed, arguments.out)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        result = headline(found)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result))
    show(result)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
