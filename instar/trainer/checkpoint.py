"""Checkpoints of a run: the backend's state and the trainer's own.

A checkpoint folder exists only when it is complete: it is written under a temporary name, flushed to disk and
renamed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from instar.backends.base import Backend
from instar.backends.folders import flush_to_disk
from instar.errors import InstarError
from instar.types import Json


class TrainerState(msgspec.Struct, frozen=True):
    step: int
    """Number of the last step whose update is in the weights."""
    seconds: float
    """Time spent training so far, in seconds."""
    baseline: Json = {}
    """State of the running baseline; empty if the estimator has none."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


async def save_checkpoint(run_dir: Path, backend: Backend, state: TrainerState) -> Path:
    target = checkpoint_path(run_dir, state.step)
    scratch = target.with_name(f".{target.name}.partial")
    for leftover in (scratch, target):
        # `target` exists only if a crash happened after the rename and before the store recorded it.
        shutil.rmtree(leftover, ignore_errors=True)
    scratch.mkdir(parents=True)
    await backend.save_state(scratch / "backend")
    (scratch / "trainer.json").write_bytes(msgspec.json.encode(state))
    flush_to_disk(scratch / "trainer.json")
    flush_to_disk(scratch)
    scratch.rename(target)
    flush_to_disk(target.parent)
    return target


async def load_checkpoint(path: Path, backend: Backend) -> TrainerState:
    state = read_trainer_state(path)
    await backend.load_state(path / "backend")
    return state


def read_trainer_state(path: Path) -> TrainerState:
    try:
        return msgspec.json.decode((path / "trainer.json").read_bytes(), type=TrainerState)
    except FileNotFoundError as error:
        raise InstarError(
            f"The store names the checkpoint {path}, which does not exist. To resume on another machine, "
            "`dir` must be a folder that both machines can access."
        ) from error


def discard_checkpoints_after(run_dir: Path, step: int) -> None:
    """Remove checkpoints of steps after ``step``. They are not in the store: they were not committed."""
    for path in (run_dir / "checkpoints").glob("step-*"):
        if path > checkpoint_path(run_dir, step):
            shutil.rmtree(path)


def find_outdated(folder: Path, keep: int, never: frozenset[Path] = frozenset()) -> list[Path]:
    """Return the numbered entries of a folder, except the newest ``keep`` and the paths in ``never``."""
    if not folder.is_dir():
        return []
    entries = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [old for old in entries[:-keep] if old not in never]


def prune_folder(folder: Path, keep: int, never: frozenset[Path] = frozenset()) -> None:
    """Remove outdated and unfinished entries from a folder."""
    for leftover in folder.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for old in find_outdated(folder, keep, never):
        shutil.rmtree(old, ignore_errors=True)
