"""Stores checkpoints in folders that are written atomically and survive server restarts.

    <folder>/<model>/weights/<name>/           a "state", to resume training from
    <folder>/<model>/sampler_weights/<name>/   a "sampler", which can only be sampled from
        checkpoint.json                        the owner and the CheckpointInfo
        adapter/                               the weights to sample from
        state/                                 the training state (missing in a sampler)

The path of a checkpoint is `tinker://<model>/weights/<name>` or `tinker://<model>/sampler_weights/<name>`.
`CheckpointStore.find` also accepts other schemes, because they differ between protocols.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from instar.backends.folders import write_folder
from instar.errors import ConfigError
from instar.protocol.base import CheckpointInfo, ProtocolError

logger = logging.getLogger(__name__)

METADATA_FILE = "checkpoint.json"
ADAPTER_FOLDER = "adapter"
STATE_FOLDER = "state"
SUBFOLDERS: dict[Literal["state", "sampler"], str] = {"state": "weights", "sampler": "sampler_weights"}
SCRATCH_FOLDER = ".scratch"
LOCK_FILE = ".lock"

_PATH_PATTERN = re.compile(r"[a-z]+://([^/]+)/(weights|sampler_weights)/([^/]+)")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class _CheckpointMetadata(msgspec.Struct, frozen=True):
    """The content of checkpoint.json."""

    owner: str
    info: CheckpointInfo


class CheckpointStore:
    """The checkpoints in a folder, which stays locked until `close`. Raises ConfigError if another server has
    locked it. Expired checkpoints and those of other owners are treated as missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = (folder / LOCK_FILE).open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock_file.close()
            raise ConfigError(f"{folder} is in use by another server") from error
        # A server that is killed while writing leaves scratch files behind.
        self._scratch_folder = folder / SCRATCH_FOLDER
        shutil.rmtree(self._scratch_folder, ignore_errors=True)
        self._rename_lock = threading.Lock()
        self._metadata: dict[str, _CheckpointMetadata] = {}
        for file in folder.glob(f"*/*/*/{METADATA_FILE}"):
            try:
                meta = msgspec.json.decode(file.read_bytes(), type=_CheckpointMetadata)
            except (OSError, ValueError) as error:  # one damaged checkpoint must not stop the server
                logger.warning("ignoring a checkpoint because %s cannot be read: %s", file, error)
                continue
            self._metadata[meta.info.path] = meta

    def close(self) -> None:
        self._lock_file.close()

    async def write(
        self,
        owner: str,
        name: str,
        info: CheckpointInfo,
        fill: Callable[[Path], Awaitable[object]],
        *,
        ttl: float | None,
    ) -> CheckpointInfo:
        """Store the checkpoint that ``fill`` writes to a folder, and return ``info`` with its path, size and
        times. A checkpoint at the same path is replaced. The new one expires after ``ttl`` seconds, or never
        if that is None. ``fill`` is called before the first await, so it saves the current state. Raises
        ProtocolError if ``name`` or ``ttl`` is invalid."""
        if _NAME_PATTERN.fullmatch(name) is None:
            raise ProtocolError(
                f"invalid checkpoint name {name!r}; use 1 to 128 letters, digits, '.', '_' and '-', not "
                "starting with '.'"
            )
        if ttl is not None and not ttl > 0:
            raise ProtocolError(f"ttl_seconds must be greater than 0, got {ttl:g}")
        self._scratch_folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._scratch_folder, ignore_cleanup_errors=True) as scratch:
            await fill(Path(scratch))
            meta = await asyncio.to_thread(self._move_into_place, Path(scratch), owner, name, info, ttl)
        self._metadata[meta.info.path] = meta
        return meta.info

    def _move_into_place(
        self, scratch: Path, owner: str, name: str, info: CheckpointInfo, ttl: float | None
    ) -> _CheckpointMetadata:
        now = time.time()
        info = replace(
            info,
            path=f"tinker://{info.model_id}/{SUBFOLDERS[info.kind]}/{name}",
            created_at=now,
            expires_at=None if ttl is None else now + ttl,
            size_bytes=sum(file.stat().st_size for file in scratch.rglob("*") if file.is_file()),
        )
        meta = _CheckpointMetadata(owner, info)

        def fill(folder: Path) -> None:
            for part in scratch.iterdir():
                part.rename(folder / part.name)
            (folder / METADATA_FILE).write_bytes(msgspec.json.encode(meta))

        with self._rename_lock:
            write_folder(self.get_folder(info), fill)
        return meta

    def find(self, path: str, owner: str) -> CheckpointInfo:
        """Return the checkpoint at a path. Raises ProtocolError 400 (invalid path) or 404 (not found)."""
        match = _PATH_PATTERN.fullmatch(path)
        if match is None:
            raise ProtocolError(
                f"invalid checkpoint path {path!r}; expected tinker://<model>/weights/<name> or "
                "tinker://<model>/sampler_weights/<name>"
            )
        meta = self._metadata.get("tinker://{}/{}/{}".format(*match.groups()))
        if meta is None or meta.owner != owner or _is_expired(meta):
            raise ProtocolError(f"checkpoint {path} was not found or has expired", 404)
        return meta.info

    def find_state(self, path: str, owner: str, *, optimizer: bool) -> CheckpointInfo:
        """Return the checkpoint at a path from which training can resume, with its optimizer state if
        ``optimizer`` is True. Raises ProtocolError like `find`, and 400 for other checkpoints."""
        info = self.find(path, owner)
        if info.kind != "state":
            raise ProtocolError(
                f"{path} cannot be loaded because it was saved for sampling only; load a training state"
            )
        if optimizer and not info.has_optimizer:
            raise ProtocolError(f"{path} has no optimizer state; load it without the optimizer")
        return info

    def get_folder(self, info: CheckpointInfo) -> Path:
        return self._folder / info.path.removeprefix("tinker://")

    def list_checkpoints(self, owner: str, model_id: str | None = None) -> list[CheckpointInfo]:
        """Return the owner's checkpoints, oldest first, optionally of a single model."""
        checkpoints = [
            meta.info
            for meta in self._metadata.values()
            if meta.owner == owner and model_id in (None, meta.info.model_id) and not _is_expired(meta)
        ]
        return sorted(checkpoints, key=lambda info: info.created_at)

    def delete(self, path: str, owner: str) -> None:
        self._remove(self.find(path, owner))

    def remove_expired(self) -> None:
        for meta in [meta for meta in self._metadata.values() if _is_expired(meta)]:
            self._remove(meta.info)

    def _remove(self, info: CheckpointInfo) -> None:
        # Rename the folder before deleting it, so that a partial checkpoint is never visible.
        self._scratch_folder.mkdir(exist_ok=True)
        with self._rename_lock, tempfile.TemporaryDirectory(dir=self._scratch_folder) as scratch:
            self.get_folder(info).rename(Path(scratch) / "removed")
        del self._metadata[info.path]


def _is_expired(meta: _CheckpointMetadata) -> bool:
    return meta.info.expires_at is not None and meta.info.expires_at <= time.time()
