"""Run `instar train` in one mode and compute the metrics of the run."""

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
DECODE_SPEED = 40.2
"""Tokens per second of the models with which the workload was recorded."""
PROMPT_SCALE = 0.25
"""An additional factor for prompt lengths, because the models used here have no context of tens of thousands
of tokens."""


@dataclass(frozen=True)
class RunPlan:
    """The settings that both runs share."""

    engine: dict[str, Any]
    model: dict[str, Any]
    backend: dict[str, Any]
    characters: str
    """The rewarded characters. The untrained model must write some, but not exclusively."""
    lr: float
    steps: int
    group_size: int
    groups_per_step: int
    concurrency: int
    max_staleness: int
    scale: float
    """The factor by which all times of the workload are multiplied."""
    speed: float
    """Decode speed of a reply on this engine, in tokens per second. Reply lengths are chosen so that decoding
    takes ``scale`` times the recorded time."""
    context: int
    eval_tasks: int
    timeout_seconds: float
    """The time limit of each run."""


def scale_workload(sessions: list[SimulatedSession], plan: RunPlan) -> list[SimulatedSession]:
    """Return the workload with scaled tool times, reply lengths and prompt lengths."""
    token_scale = plan.scale * plan.speed / DECODE_SPEED
    return [_scale_session(session, token_scale, plan) for session in sessions]


def _scale_session(session: SimulatedSession, token_scale: float, plan: RunPlan) -> SimulatedSession:
    turns: list[SimulatedTurn] = []
    for turn in session.turns:
        prompt_tokens = round(PROMPT_SCALE * token_scale * turn.prompt_tokens)
        reply_tokens = min(plan.context // 4, max(1, round(token_scale * turn.generated_tokens)))
        turns.append(SimulatedTurn(prompt_tokens, reply_tokens, plan.scale * turn.tool_seconds))
    return SimulatedSession(tuple(turns))


def make_run_settings(plan: RunPlan, mode: Mode, folder: Path, workload: Path, seed: int) -> dict[str, Any]:
    """Return the run's settings.

    The modes differ only in `trainer.mode`, `trainer.max_staleness` and the run's name and folder.
    """
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
            "tasks": {"type": "python", "function": "async_parts.agent:make_tasks", "args": args},
            "agent": {
                "type": "function",
                "function": "async_parts.agent:agent",
                "args": {"context": plan.context, "characters": plan.characters},
            },
            "group_size": plan.group_size,
            "concurrency": plan.concurrency,
            "timeout": plan.timeout_seconds,
            "shuffle": False,
        },
        "eval": {
            "tasks": {
                "type": "python",
                "function": "async_parts.agent:make_heldout_tasks",
                "args": {"size": plan.eval_tasks},
            },
            "modes": {"sampled": {"temperature": 1.0}},
        },
    }


def run_training(plan: RunPlan, mode: Mode, folder: Path, workload: Path, seed: int) -> dict[str, Any]:
    """Run `instar train` and return its metrics. Raises RuntimeError if it fails or times out."""
    config_path = folder / f"{mode}.yaml"
    settings = make_run_settings(plan, mode, folder, workload, seed)
    config_path.write_text(yaml.safe_dump(settings, sort_keys=False))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")]),
    }
    log_path = folder / f"{mode}.log"
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "instar.cli.main", "train", str(config_path), "--json"],
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=environment,
            cwd=folder,
        )
        try:
            output, _ = process.communicate(timeout=plan.timeout_seconds)
        except subprocess.TimeoutExpired:
            stop_process(process)
            raise RuntimeError(
                f"{mode}: the run did not finish within {plan.timeout_seconds:.0f} s; see {log_path}"
            ) from None
        except BaseException:  # including Ctrl-C, after which the run would continue
            stop_process(process)
            raise
    if process.returncode != 0:
        last_lines = log_path.read_text(errors="replace").strip().splitlines()[-15:]
        raise RuntimeError(
            f"{mode}: the run exited with code {process.returncode}; see {log_path}\n" + "\n".join(last_lines)
        )
    return compute_metrics(folder / mode, json.loads(output.decode().strip().splitlines()[-1]))


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate `instar train`, which then stops its roles. Kill it if it does not exit within 20 seconds."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def compute_metrics(run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics from the moment the trainer was ready to the end of the last step."""
    steps = read_steps(run_dir)
    started_at = float((run_dir / "started_at").read_text())
    seconds = steps[-1]["time"] - started_at
    samples = sum(step["samples"] for step in steps)
    eval_rewards = {r["label"]: r["accuracy"] for r in read_metrics(run_dir) if r["kind"] == "eval"}
    final_rewards = load_final_rewards(run_dir)
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
        "reward_before": eval_rewards.get("before"),
        "reward": eval_rewards.get("after"),
        "reward_error": statistics.stdev(final_rewards) / math.sqrt(len(final_rewards)),
        "reward_last_steps": sum(step["reward_mean"] for step in steps[-5:]) / len(steps[-5:]),
        "finished_at": time.time(),
        "stopped": summary["stopped"],
    }


def load_final_rewards(run_dir: Path) -> list[float]:
    """Return the rewards of the held-out tasks after training. Each task was attempted once."""

    async def read() -> list[float]:
        async with open_run_store(run_dir, read_only=True) as (config, store):
            rows = await store.sessions(config.name, channel=Channel.VAL)
        return [row.reward or 0.0 for row in rows if "/val/after-" in (row.session.group_id or "")]

    return asyncio.run(read())
