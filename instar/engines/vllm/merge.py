"""Merge an adapter into the base model's weights, for vLLM."""

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

INDEX_FILE = "model.safetensors.index.json"
SHARED_MEMORY = Path("/dev/shm")
HEADER_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, in a field of this size."""
TIED_WEIGHT = "lm_head.weight"
"""The name of the output weights. Some files contain them even if they are tied to the embedding."""

Shapes = dict[str, tuple[int, ...]]


@contextmanager
def merge_adapter(base: Path, adapter: Path, dtype: str, *, beside_adapter: bool = False) -> Generator[Path]:
    """Yield a temporary folder with the merged full weights. The folder is next to the adapter if
    ``beside_adapter`` is True, else in shared memory if there is space, else in the system's temporary
    folder. Updated weights are stored in ``dtype`` (`bf16` or `fp32`), other weights as in the base model."""
    paths = list_weight_files(base)
    size = sum(path.stat().st_size for path in paths)
    # Merged weights need at most twice the space of the base model (fp32 instead of bf16), plus headroom.
    fits_in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * size
    parent = adapter.parent if beside_adapter else SHARED_MEMORY if fits_in_memory else None
    with tempfile.TemporaryDirectory(prefix="instar-merged-", dir=parent) as folder:
        _write_merged(paths, adapter, Path(folder), dtype)
        for name in (INDEX_FILE, "config.json"):
            if (base / name).is_file():
                shutil.copy(base / name, folder)
        yield Path(folder)


def _write_merged(paths: list[Path], adapter: Path, target: Path, dtype: str) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from instar.engines.local.lora import check_update, read_updates

    target_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    updates, scale = read_updates(adapter)
    for path in paths:
        tensors: dict[str, Tensor] = {}
        with cast(Any, safe_open(path, "pt")) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor: Tensor = file.get_tensor(name)
                if matrices := updates.pop(name.removesuffix(".weight"), None):
                    check_update(name, matrices, tuple(tensor.shape))
                    a, b = matrices["A"].float(), matrices["B"].float()
                    tensor = tensor.float().addmm(b, a, alpha=scale).to(target_dtype)
                    if not tensor.isfinite().all():
                        raise EngineError(f"The merged weights of {name} contain NaN or infinite values.")
                tensors[name] = tensor
        save_file(tensors, target / path.name, metadata={"format": "pt"})
    if updates:
        raise EngineError(f"The adapter updates {next(iter(updates))}, which the base model does not have.")


def list_weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        index = msgspec.json.decode((folder / INDEX_FILE).read_bytes())
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise EngineError(f"{folder} contains neither model.safetensors nor {INDEX_FILE}.")


def read_shapes(folder: Path) -> Shapes:
    shapes: Shapes = {}
    try:
        for path in list_weight_files(folder):
            with path.open("rb") as file:
                length = min(int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little"), path.stat().st_size)
                header = msgspec.json.decode(file.read(length))
            header.pop("__metadata__", None)
            shapes.update({name: tuple(entry["shape"]) for name, entry in header.items()})
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise EngineError(f"The weights in {folder} cannot be read: {error}") from error
    return shapes


def check_same_shapes(folder: Path, base: Path) -> None:
    """Raise EngineError unless both folders have weights with the same names and shapes. Tied output weights
    may be missing in one of the folders."""
    shapes, base_shapes = read_shapes(folder), read_shapes(base)
    tied_in_one = {TIED_WEIGHT} & (shapes.keys() ^ base_shapes.keys())
    for name in sorted((shapes.keys() | base_shapes.keys()) - tied_in_one):
        check_shape(name, shapes.get(name), base_shapes.get(name))


def check_shape(name: str, shape: tuple[int, ...] | None, expected: tuple[int, ...] | None) -> None:
    if shape == expected:
        return
    if shape is None:
        problem = f"weight {name} is missing"
    elif expected is None:
        problem = f"unexpected weight {name}"
    else:
        problem = f"{name} has shape {shape}, expected {expected}"
    raise EngineError(f"The weights do not match the architecture of the base model: {problem}.")
