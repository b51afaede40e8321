"""Merges an adapter into the base model's weights and writes them to a folder that vLLM can read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from instar.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
MEMORY = Path("/dev/shm")
HEAD_BYTES = 8
"""The size of the length field at the beginning of a safetensors file."""

Shapes = dict[str, tuple[int, ...]]


@contextmanager
def merge_adapter(base: Path, adapter: Path, dtype: str, *, beside_adapter: bool = False) -> Generator[Path]:
    """Provide a temporary folder with the merged full weights. It is in memory if there is room, else on
    disk, or next to the adapter if requested. Adapted weights are computed in fp32 and stored in ``dtype``
    (`bf16` or `fp32`); the others are stored as in the base model."""
    files = weight_files(base)
    size = sum(file.stat().st_size for file in files)
    in_memory = (
        MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 3 * size
    )  # fp32 instead of bf16, with a margin
    where = adapter.parent if beside_adapter else MEMORY if in_memory else None
    with tempfile.TemporaryDirectory(prefix="instar-merged-", dir=where) as folder:
        _write(files, adapter, Path(folder), dtype)
        for name in (INDEX, "config.json"):
            if (base / name).is_file():
                shutil.copy(base / name, folder)
        yield Path(folder)


def _write(files: list[Path], adapter: Path, target: Path, dtype: str) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from instar.engines.local.lora import read_updates

    target_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    halves, scale = read_updates(adapter)
    for file in files:
        tensors: dict[str, Tensor] = {}
        with cast(Any, safe_open(file, "pt")) as opened:
            for name in opened.keys():  # noqa: SIM118 - no dict
                tensor: Tensor = opened.get_tensor(name)
                update = halves.pop(name.removesuffix(".weight"), None)
                tensors[name] = (
                    tensor if update is None else _apply_update(name, tensor, update, scale).to(target_dtype)
                )
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    if halves:
        raise EngineError(f"The adapter adapts {next(iter(halves))}, which the base model does not have.")


def _apply_update(name: str, tensor: Tensor, halves: dict[str, Tensor], scale: float) -> Tensor:
    if halves.keys() != {"A", "B"}:
        raise EngineError(f"The adapter's update of {name} needs both lora_A and lora_B.")
    down, up = halves["A"].float(), halves["B"].float()
    if (up.shape[0], down.shape[1]) != tuple(tensor.shape) or up.shape[1] != down.shape[0]:
        raise EngineError(f"The adapter's update of {name} does not have that layer's shape.")
    updated = tensor.float().addmm(up, down, alpha=scale)
    if not updated.isfinite().all():
        raise EngineError(f"The adapter's update of {name} is not finite.")
    return updated


def weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        index = msgspec.json.decode((folder / INDEX).read_bytes())
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise EngineError(f"{folder} has no weights in safetensors files.")


def read_shapes(folder: Path) -> Shapes:
    """Return the shapes of all weights in a folder, from the headers of its files."""
    shapes: Shapes = {}
    try:
        for file in weight_files(folder):
            with file.open("rb") as opened:
                length = min(int.from_bytes(opened.read(HEAD_BYTES), "little"), file.stat().st_size)
                header = msgspec.json.decode(opened.read(length))
            header.pop("__metadata__", None)
            shapes.update({name: tuple(entry["shape"]) for name, entry in header.items()})
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise EngineError(f"The weights in {folder} cannot be read: {error}") from error
    return shapes


def check_same_shapes(folder: Path, base: Path) -> None:
    """Raise EngineError unless the weights in the folder have the base model's architecture. Only one of the
    two may contain the tied output weights."""
    ours, theirs = read_shapes(base), read_shapes(folder)
    if any(theirs[name] != ours[name] for name in theirs.keys() & ours.keys()) or (
        set(ours) ^ set(theirs)
    ) - {"lm_head.weight"}:
        raise EngineError(f"The weights in {folder} are of another architecture.")
