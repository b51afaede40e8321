"""Train with `instar train` and collect the checkpoints of the run."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from gateway_parts.processes import MeasurementError, read_log_tail, start_process

from instar.trainer.monitor import read_steps
from learning_parts.results import Checkpoint
from learning_parts.tasks import VLLM_GPU_MEMORY, LearningTask

if TYPE_CHECKING:
    from instar.types import Json

BENCH = Path(__file__).resolve().parent.parent
RUN_FOLDER = "run"
NEVER = 10**6
"""A number of steps that no run reaches."""
GRACE_SECONDS = 600.0
"""How much longer than its training time a process may run, to start, finish the last step and save."""


def make_run_settings(task: LearningTask, seed: int, seconds: float, vllm_python: str | None = None) -> Json:
    """Return the run config. Apart from the task, it has Instar's default settings. Every published adapter
    is written to a file and kept, and the optimizer's state is saved only at the end. With ``vllm_python``,
    the run samples with the vLLM of this interpreter and trains on the same GPU."""
    settings: Json = {
        **task.make_settings(),
        "name": "learning",
        "dir": RUN_FOLDER,
        "seed": seed,
        "trainer": {
            "seconds": seconds,
            "steps": NEVER,
            "checkpoint_every": NEVER,
            "keep_checkpoints": NEVER,
            "tensorboard": False,
        },
        "sync": {"route": "files"},
    }
    if vllm_python is None:
        return settings
    engine = {"type": "vllm", "python": vllm_python, "gpu_memory": VLLM_GPU_MEMORY}
    return {**settings, "model": {**settings["model"], "device": "cuda"}, "engine": engine}


def run_instar(
    settings: Json, seconds: float, folder: Path, python: str = sys.executable
) -> list[Checkpoint]:
    """Run `instar train` with the run config ``settings`` and the interpreter ``python`` in ``folder``, and
    return its checkpoints."""
    config_path = folder / "config.yaml"
    config_path.write_text(yaml.safe_dump(settings, sort_keys=False))
    run_to_end([python, "-m", "instar.cli.main", "train", config_path.name, "--json"], folder, seconds)
    return collect_checkpoints(folder)


def run_to_end(command: list[str], folder: Path, seconds: float) -> None:
    """Run a training process in ``folder``. Raises MeasurementError if it fails or does not end in time."""
    log_path = folder / "log"
    env = {"PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])}
    with start_process(command, log_path, env=env, cwd=folder) as process:
        try:
            code = process.wait(seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise MeasurementError(
                f"the run did not end {GRACE_SECONDS:.0f} s after its training time; see {log_path}"
            ) from None
    if code != 0:
        raise MeasurementError(f"the run exited with code {code}: {read_log_tail(log_path)} (see {log_path})")


def collect_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of the run in ``folder`` from its metrics. The samples include groups without
    signal, because they were generated, too, and the time includes the head start."""
    checkpoints: list[Checkpoint] = []
    samples, tokens = 0, 0.0
    steps = read_steps(folder / RUN_FOLDER)
    head_start = compute_head_start(folder, steps[0]["time"] - steps[0]["elapsed"]) if steps else 0.0
    for step in steps:
        sessions = step.get("sessions", 0)
        samples += sessions
        tokens += sessions * (step.get("output_tokens_mean") or 0.0)
        adapter = f"{RUN_FOLDER}/policies/v{step['version']:06d}"
        seconds = step["elapsed"] + head_start
        checkpoints.append(Checkpoint(step["step"], seconds, samples, round(tokens), adapter))
    if not checkpoints:
        raise MeasurementError(f"the run in {folder} trained no step; increase --seconds")
    return checkpoints


def compute_head_start(folder: Path, clock_start: float) -> float:
    """Return for how many seconds the run sampled before its clock started: from the start of the first
    training session to the end of the last one that started before the clock, or to the start of the clock.
    In the remaining time until then, it only waited for the trainer to load the model."""
    path = folder / RUN_FOLDER / "store.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        query = (
            "SELECT min(created_at), max(coalesce(ended_at, ?)) FROM sessions "
            "WHERE channel = 'train' AND created_at < ?"
        )
        start, end = database.execute(query, (clock_start, clock_start)).fetchone()
    return 0.0 if start is None else min(end, clock_start) - start


def compute_unused_share(folder: Path, used_samples: int) -> float:
    """Return the share of the started training sessions that no step used, because they failed, were dropped
    or arrived too late. It is 0 for a contender without Instar's store, which uses all its samples."""
    path = folder / RUN_FOLDER / "store.db"
    if not path.is_file():
        return 0.0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        query = "SELECT count(*) FROM sessions WHERE channel = 'train'"
        sessions: int = database.execute(query).fetchone()[0]
    return 1 - used_samples / sessions
