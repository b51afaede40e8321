"""Checkpoints of a run: the backend's state and what the trainer itself must remember.

A checkpoint is a folder that exists only when it is complete: written beside its place, flushed
to disk, then renamed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from instar.backends.base import Backend
from instar.errors import InstarError
from instar.types import Json


class TrainerState(msgspec.Struct, frozen=True):
    """What a resumed trainer needs beyond the backend's own state."""

    step: int
    """Last step whose update is in the weights."""
    seconds: float
    """Time spent training so far."""
    baseline: Json = {}
    """State of the running baseline, when the estimator has one."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


async def save_checkpoint(run_dir: Path, backend: Backend, state: TrainerState) -> Path:
    target = checkpoint_path(run_dir, state.step)
    scratch = target.with_name(f".{target.name}.partial")
    for leftover in (scratch, target):
        # `target` can only be the work of a crash between the rename and the row that names it.
        shutil.rmtree(leftover, ignore_errors=True)
    scratch.mkdir(parents=True)
    await backend.save_state(scratch / "backend")
    (scratch / "trainer.json").write_bytes(msgspec.json.encode(state))
    _flush(scratch / "trainer.json")
    _flush(scratch)
    scratch.rename(target)
    _flush(target.parent)
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
            f"the store names the checkpoint {path}, which is not there; for a trainer to go on on another "
            "machine, `dir` must be a folder that both see"
        ) from error


def discard_checkpoints_after(run_dir: Path, step: int) -> None:
    """Remove checkpoints of later steps: the store does not name them, so they never counted."""
    for path in (run_dir / "checkpoints").glob("step-*"):
        if path > checkpoint_path(run_dir, step):
            shutil.rmtree(path)


def find_outdated(folder: Path, keep: int, never: frozenset[Path] = frozenset()) -> list[Path]:
    """All but the newest ``keep`` entries of a folder of numbered ones."""
    if not folder.is_dir():
        return []
    entries = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [old for old in entries[:-keep] if old not in never]


def prune_folder(folder: Path, keep: int, never: frozenset[Path] = frozenset()) -> None:
    """Remove what is outdated, and leftovers."""
    for leftover in folder.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for old in find_outdated(folder, keep, never):
        shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
