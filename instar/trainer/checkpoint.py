"""Save, verify, load and prune checkpoints, which contain the state of the backend and of the trainer.

A checkpoint folder is written under a temporary name, flushed to disk and then renamed, so a folder with the
final name is always complete. It contains the hashes of its files, which reveal later damage.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from instar.backends.base import Backend
from instar.backends.folders import flush_to_disk
from instar.config import RunConfig
from instar.errors import BackendError, InstarError, NonFiniteError
from instar.types import Artifact, Json

logger = logging.getLogger(__name__)

HASHES_FILE = "hashes.json"
BACKEND_FOLDER = "backend"
"""The folder with the state of the backend, in a checkpoint and in `initial_path`."""
ADAPTER_FOLDER = "adapter"
MAX_REWINDS = 3
REWIND_LR_SCALE = 0.5
"""The factor by which each rewind changes the learning rate."""


@dataclass
class TrainingTimer:
    """Measures the wall-clock time of training, including waits. A restart continues from the saved time."""

    previous_seconds: float = 0.0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.previous_seconds + time.monotonic() - self.started_at


class RewindState(msgspec.Struct, frozen=True):
    """The checkpoint to which a collapsed run goes back, and the effect of earlier rewinds."""

    best_step: int = 0
    """The saved step with the best recent reward, or 0 if there is none."""
    best_reward: float | None = None
    count: int = 0
    """The number of rewinds so far."""

    @property
    def lr_scale(self) -> float:
        return REWIND_LR_SCALE**self.count

    def update(self, step: int, reward: float | None) -> RewindState:
        """Return the state after ``step`` is saved. ``reward`` is the mean reward of the last steps."""
        if reward is None or (self.best_reward is not None and reward <= self.best_reward):
            return self
        return msgspec.structs.replace(self, best_step=step, best_reward=reward)


class TrainerState(msgspec.Struct, frozen=True):
    step: int
    """The last step whose update is in the weights."""
    seconds: float
    """The training time so far, as measured by the trainer's `TrainingTimer`."""
    baseline: Json = {}
    """The state of the running baseline, or {} if the advantage estimator has none."""
    rewind: RewindState = RewindState()
    kl_lr_scale: float = 1.0
    """The effect of `trainer.max_kl` on the learning rate."""
    base_kl_weight: float = 0.0
    """The weight of the KL to the base model in the loss."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder with the checkpoint of a step. ``folder`` is that of the policy."""
    return folder / "checkpoints" / f"step-{step:06d}"


def policy_path(folder: Path, version: int) -> Path:
    """Return the folder with the published weights of a version. ``folder`` is that of the policy."""
    return folder / "policies" / f"v{version:06d}"


def initial_path(run_dir: Path) -> Path:
    """Return the folder with a copy of the adapter and the training state that the run starts from."""
    return run_dir / "initial"


async def load_initial_weights(config: RunConfig, backend: Backend) -> None:
    """Start the backend with the adapter in `model.adapter`, or with an untrained one if it is not set. Only
    an adapter that is named by its path on a training service has no copy in the run's folder."""
    folder = initial_path(config.run_dir)
    if config.model.adapter is None:
        await backend.start()
    elif (folder / BACKEND_FOLDER).is_dir():
        await backend.load_state(folder / BACKEND_FOLDER)
    elif config.model.adapter_source in ("folder", "run"):
        await backend.load_adapter(str(folder / ADAPTER_FOLDER))
    else:
        await backend.load_adapter(config.model.adapter)


async def save_checkpoint(folder: Path, backend: Backend, state: TrainerState) -> Path:
    target = checkpoint_path(folder, state.step)
    scratch = target.with_name(f".{target.name}.partial")
    for leftover in (scratch, target):
        # `target` exists if an earlier process crashed before the store recorded the checkpoint.
        shutil.rmtree(leftover, ignore_errors=True)
    scratch.mkdir(parents=True)
    await backend.save_state(scratch / BACKEND_FOLDER)
    (scratch / "trainer.json").write_bytes(msgspec.json.encode(state))
    hashes = await asyncio.to_thread(_hash_files, scratch)
    (scratch / HASHES_FILE).write_bytes(msgspec.json.encode(hashes))
    for path in (scratch / "trainer.json", scratch / HASHES_FILE, scratch):
        flush_to_disk(path)
    scratch.rename(target)
    flush_to_disk(target.parent)
    return target


def _hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file, keyed by its path relative to the folder."""
    hashes: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            hashes[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def find_damage(path: Path) -> str | None:
    """Return what is wrong with the checkpoint, or None if it is intact. Checkpoints saved by earlier
    versions of Instar have no hashes, so only their trainer state is checked."""
    if not path.is_dir():
        return "it does not exist; to resume on a different machine, set `dir` to a folder on a shared disk"
    try:
        if (path / HASHES_FILE).exists():
            expected = msgspec.json.decode((path / HASHES_FILE).read_bytes(), type=dict[str, str])
            actual = _hash_files(path)
            for name, digest in expected.items():
                if actual.get(name) != digest:
                    return f"{name}: {'wrong SHA-256' if name in actual else 'the file is missing'}"
        read_trainer_state(path)
    except (OSError, ValueError) as error:
        return f"{HASHES_FILE}: {error}"
    except InstarError as error:
        return str(error)
    return None


def read_trainer_state(path: Path) -> TrainerState:
    try:
        return msgspec.json.decode((path / "trainer.json").read_bytes(), type=TrainerState)
    except (OSError, ValueError) as error:
        raise InstarError(f"cannot read {path / 'trainer.json'}: {error}") from error


async def load_newest_intact(
    folder: Path, backend: Backend, steps: Sequence[int]
) -> tuple[TrainerState, frozenset[Path]]:
    """Load the newest intact checkpoint into the backend. ``steps`` are the saved steps, oldest first. Return
    the trainer's state and the paths of newer checkpoints that are damaged. Raises InstarError if no
    checkpoint is intact."""
    damaged: dict[Path, str] = {}
    for step in reversed(steps):
        path = checkpoint_path(folder, step)
        damage = await asyncio.to_thread(find_damage, path)
        if damage is None:
            try:
                await backend.load_state(path / BACKEND_FOLDER)
                break
            except NonFiniteError as error:  # earlier versions of Instar could save such weights
                damage = str(error)
        damaged[path] = damage
    else:
        path, damage = next(iter(damaged.items()))
        raise InstarError(
            f"The checkpoint {path} is damaged or missing ({damage}), and no older checkpoint is intact. "
            "Restore it from a backup, or start a new run."
        )
    if damaged:
        details = ", ".join(f"{path} ({damage})" for path, damage in damaged.items())
        message = "damaged or missing checkpoints: %s. The updates of steps %s are lost and will be repeated"
        logger.warning(message, details, list(range(step + 1, steps[-1] + 1)))
    logger.info("resuming after step %s", step)
    return read_trainer_state(path), frozenset(damaged)


def remove_checkpoints_after(folder: Path, step: int, damaged: frozenset[Path]) -> None:
    """Remove the checkpoints of steps after ``step``, which the store does not refer to. Move those in
    ``damaged`` to the folder "damaged", so that the user can inspect them."""
    for path in (folder / "checkpoints").glob("step-*"):
        if path in damaged:
            target = folder / "damaged" / path.name
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        elif path > checkpoint_path(folder, step):
            shutil.rmtree(path)


def find_outdated(folder: Path, keep_count: int, exclude: frozenset[Path]) -> list[Path]:
    """Return the complete subfolders, except the newest ``keep_count`` and those in ``exclude``."""
    complete = sorted(path for path in folder.glob("[!.]*") if path.is_dir())
    return [path for path in complete[:-keep_count] if path not in exclude]


async def remove_outdated_checkpoints(
    folder: Path, backend: Backend, keep_count: int, kept_steps: Sequence[int]
) -> None:
    """Remove all checkpoints except the newest ``keep_count`` and those of ``kept_steps``."""
    exclude = frozenset(checkpoint_path(folder, step) for step in kept_steps)
    folder /= "checkpoints"
    for path in find_outdated(folder, keep_count, exclude):
        try:
            await backend.discard_state(path / BACKEND_FOLDER)
        except BackendError as error:
            logger.warning("the backend could not delete the state of %s: %s", path.name, error)
    prune_folder(folder, keep_count, exclude)


def is_pruned(artifact: Artifact) -> bool:
    return artifact.kind in ("adapter", "weights") and not Path(artifact.path).exists()


def prune_folder(folder: Path, keep_count: int, exclude: frozenset[Path]) -> None:
    """Remove incomplete subfolders, and the complete ones that `find_outdated` returns."""
    for path in [*folder.glob(".*"), *find_outdated(folder, keep_count, exclude)]:
        shutil.rmtree(path, ignore_errors=True)
