"""One run of the bench: its YAML, `instar train` on it, and what came of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from instar.cli.run_store import open_run_store
from instar.simulate.sessions import SimulatedSession, SimulatedTurn
from instar.trainer.monitor import read_metrics, read_steps
from instar.types import Channel

BENCH = Path(__file__).resolve().parent.parent
Mode = Literal["async", "sync"]
DECODE = 40.2
"""Tokens per second of the models that the workload was recorded with."""
PROMPTS = 0.25
"""What is left of the prompts beside: a cached context of tens of thousands of tokens is no model's here."""


@dataclass(frozen=True)
class Plan:
    """What both runs have in common."""

    engine: dict[str, Any]
    model: dict[str, Any]
    backend: dict[str, Any]
    kind: str
    """Of characters that are rewarded: some of them are written before training, and not all."""
    lr: float
    steps: int
    group_size: int
    groups_per_step: int
    concurrency: int
    max_staleness: int
    scale: float
    """Of all times of the workload."""
    speed: float
    """Tokens per second of a reply on this engine; replies are scaled so that they take their scaled time."""
    context: int
    eval_tasks: int
    limit: float
    """Seconds that a run may take."""


def scaled(sessions: list[SimulatedSession], plan: Plan) -> list[SimulatedSession]:
    """The workload in the bench's time. The agent ends a session that outgrows the model's context."""
    share = plan.scale * plan.speed / DECODE
    return [_shorter(session, share, plan) for session in sessions]


def _shorter(session: SimulatedSession, share: float, plan: Plan) -> SimulatedSession:
    turns: list[SimulatedTurn] = []
    for turn in session.turns:
        tokens = min(plan.context // 4, max(1, round(share * turn.generated)))
        turns.append(
            SimulatedTurn(round(PROMPTS * share * turn.prompt), tokens, plan.scale * turn.tool_seconds)
        )
    return SimulatedSession(tuple(turns))


def settings(plan: Plan, mode: Mode, folder: Path, workload: Path, seed: int) -> dict[str, Any]:
    """The run's YAML. The two modes differ in `trainer.mode` and `trainer.max_staleness`, and in nothing
    else."""
    staleness = {"max_staleness": plan.max_staleness} if mode == "async" else {}
    groups = plan.steps * plan.groups_per_step
    args = {
        "workload": str(workload),
        "group_size": plan.group_size,
        "groups": 2 * groups,
        "run_dir": str(folder / mode),
    }
    return {
        "name": mode,
        "dir": str(folder / mode),
        "seed": seed,
        "model": {**plan.model, "max_context": plan.context},
        "engine": plan.engine,
        "backend": plan.backend,
        "trainer": {
            "mode": mode,
            **staleness,
            "steps": plan.steps,
            "groups_per_step": plan.groups_per_step,
            "adam": {"lr": plan.lr},
            "loss": {"name": "importance_sampling"},
            "warmup_steps": 0,
            "tensorboard": False,
        },
        "rollout": {
            "tasks": {"type": "python", "function": "async_parts.play:tasks", "args": args},
            "agent": {
                "type": "function",
                "function": "async_parts.play:play",
                "args": {"context": plan.context, "kind": plan.kind},
            },
            "group_size": plan.group_size,
            "concurrency": plan.concurrency,
            "timeout": plan.limit,
            "shuffle": False,
        },
        "eval": {
            "tasks": {
                "type": "python",
                "function": "async_parts.play:heldout",
                "args": {"size": plan.eval_tasks},
            },
            "modes": {"sampled": {"temperature": 1.0}},
        },
    }


def run(plan: Plan, mode: Mode, folder: Path, workload: Path, seed: int) -> dict[str, Any]:
    """`instar train`, to its end; returns its figures. RuntimeError where it fails or takes too long."""
    file = folder / f"{mode}.yaml"
    file.write_text(yaml.safe_dump(settings(plan, mode, folder, workload, seed), sort_keys=False))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")]),
    }
    log = folder / f"{mode}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "instar.cli.main", "train", str(file), "--json"],
            stdout=subprocess.PIPE,
            stderr=out,
            env=environment,
            cwd=folder,
        )
        try:
            printed, _ = process.communicate(timeout=plan.limit)
        except subprocess.TimeoutExpired:
            stop(process)
            raise RuntimeError(f"{mode}: no end after {plan.limit:.0f} s; see {log}") from None
        except BaseException:  # Ctrl-C too: the run would go on
            stop(process)
            raise
    if process.returncode != 0:
        said = log.read_text(errors="replace").strip().splitlines()[-15:]
        raise RuntimeError(f"{mode}: exit code {process.returncode}; see {log}\n" + "\n".join(said))
    return figures(folder / mode, json.loads(printed.decode().strip().splitlines()[-1]))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Its roles end with it."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def figures(run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """From the moment that the trainer was up to the end of the last step."""
    steps = read_steps(run_dir)
    began = float((run_dir / "began").read_text())
    seconds = steps[-1]["time"] - began
    samples = sum(step["samples"] for step in steps)
    evaluated = {r["label"]: r["accuracy"] for r in read_metrics(run_dir) if r["kind"] == "eval"}
    after = rewards_after(run_dir)
    step_seconds = [step["step_seconds"] for step in steps]
    return {
        "seconds": seconds,
        "samples": samples,
        "samples_per_hour": 3600 * samples / seconds,
        "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        "train_seconds": sum(step["train_seconds"] for step in steps) / len(steps),
        "trainer_idle": 1 - sum(step_seconds) / seconds,
        "stale_dropped": sum(step["stale_dropped"] for step in steps),
        "staleness_mean": sum(step["staleness_mean"] for step in steps) / len(steps),
        "staleness_max": max(step["staleness_max"] for step in steps),
        "reward_before": evaluated.get("before"),
        "reward": evaluated.get("after"),
        "reward_error": statistics.stdev(after) / math.sqrt(len(after)),
        "reward_last_steps": sum(step["reward_mean"] for step in steps[-5:]) / len(steps[-5:]),
        "finished_at": time.time(),
        "stopped": summary["stopped"],
    }


def rewards_after(run_dir: Path) -> list[float]:
    """Of the held-out tasks, each tried once after training."""

    async def read() -> list[float]:
        async with open_run_store(run_dir, read_only=True) as (config, store):
            rows = await store.sessions(config.name, channel=Channel.VAL)
        return [row.reward or 0.0 for row in rows if "/val/after-" in (row.session.group_id or "")]

    return asyncio.run(read())
