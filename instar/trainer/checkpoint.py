"""Save and load the checkpoints of a run, which contain the states of the backend and the trainer.

A checkpoint folder is written under a temporary name, flushed to disk and then renamed, so that it exists
only when it is complete.
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
    """The last step whose update is in the weights."""
    seconds: float
    """The training time until the checkpoint, in seconds."""
    baseline: Json = {}
    """The state of the running baseline; empty if the advantage estimator has none."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


async def save_checkpoint(run_dir: Path, backend: Backend, state: TrainerState) -> Path:
    target = checkpoint_path(run_dir, state.step)
    scratch = target.with_name(f".{target.name}.partial")
    for leftover in (scratch, target):
        # `target` exists if an earlier process crashed before the store recorded the checkpoint.
        shutil.rmtree(leftover, ignore_errors=True)
    scratch.mkdir(parents=True)
    await backend.save_state(scratch / "backend")
    (scratch / "trainer.json").write_bytes(msgspec.json.encode(state))
    flush_to_disk(scratch / "trainer.json")
    flush_to_disk(scratch)
    scratch.rename(target)
    flush_to_disk(target.parent)
    return target


def read_trainer_state(path: Path) -> TrainerState:
    try:
        return msgspec.json.decode((path / "trainer.json").read_bytes(), type=TrainerState)
    except FileNotFoundError as error:
        raise InstarError(
            f"The store refers to the checkpoint {path}, which does not exist. To resume on another machine, "
            "set `dir` to a folder that both machines can access."
        ) from error


def discard_checkpoints_after(run_dir: Path, step: int) -> None:
    """Remove the checkpoints of later steps. The store does not refer to them."""
    for path in (run_dir / "checkpoints").glob("step-*"):
        if path > checkpoint_path(run_dir, step):
            shutil.rmtree(path)


def find_outdated(folder: Path, count: int, exclude: frozenset[Path]) -> list[Path]:
    """Return the numbered entries of a folder, except the newest ``count`` and the paths in ``exclude``."""
    if not folder.is_dir():
        return []
    entries = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [path for path in entries[:-count] if path not in exclude]


def prune_folder(folder: Path, count: int, exclude: frozenset[Path]) -> None:
    """Remove incomplete entries, and all entries except the newest ``count`` and those in ``exclude``."""
    for path in [*folder.glob(".*"), *find_outdated(folder, count, exclude)]:
        shutil.rmtree(path, ignore_errors=True)
