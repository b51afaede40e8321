"""Read and write published adapters and weights, and saved training states, without pickle."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from instar.adapters import CONFIG_FILE, PEFT_PREFIX, WEIGHTS_FILE
from instar.backends.folders import write_folder
from instar.backends.weight_export import ADAPTER
from instar.errors import BackendError, NonFiniteError

FORMAT = 1
TENSORS_FILE = "state.safetensors"
METADATA_FILE = "state.json"


def find_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor with a NaN or an infinity, or None if there is none."""
    floats = [tensor.detach() for tensor in tensors.values() if tensor.is_floating_point()]
    # One norm over all tensors needs few kernels on a GPU. It may also overflow, so the search decides.
    if torch.isfinite(torch.nn.utils.get_total_norm(floats)):
        return None
    return next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises NonFiniteError if a tensor other than a gradient is not finite."""
    applied = {name: tensor for name, tensor in tensors.items() if not name.startswith("grad/")}
    if name := find_non_finite(applied):
        raise NonFiniteError(
            f"{name} has non-finite values, so {path.name} was not written; load an earlier state and lower "
            "the learning rate"
        )
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


def write_adapter_files(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    write_tensors(folder / WEIGHTS_FILE, weights)
    content: dict[str, Any] = {**config, "inference_mode": True}
    # Sorted, so that equal adapters have equal files.
    if isinstance(content["target_modules"], (set, list)):
        content["target_modules"] = sorted(cast(list[str], content["target_modules"]))
    text = json.dumps(content, indent=2, sort_keys=True, default=list)
    (folder / CONFIG_FILE).write_text(text + "\n")


def write_weights(weights: Mapping[str, Tensor], source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights to ``folder``, with the config and tokenizer of the original model in ``source``."""
    write_tensors(folder / "model.safetensors", weights)
    for file in source.iterdir():
        has_copied_suffix = file.suffix in {".json", ".jinja", ".model", ".txt"}
        if has_copied_suffix and file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    config = cast(dict[str, Any], json.loads((folder / "config.json").read_text()))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_adapter_weights(path: Path, parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy the weights of an adapter folder to the parameters, and drop gradients. Raises BackendError,
    without changing anything, if the adapter cannot be read or does not fit the parameters."""
    try:
        tensors = load_file(path / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise BackendError(f"the adapter in {path} cannot be read: {error}") from error
    weights = {_to_parameter_name(name): tensor for name, tensor in tensors.items()}
    _check_fits(path, weights, parameters)
    _copy_weights(weights, parameters)


def _to_parameter_name(name: str) -> str:
    """Convert a name in an adapter's file to the name of the parameter in the model."""
    module, separator, matrix = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
    return f"{module}{separator}{matrix.removesuffix('.weight')}.{ADAPTER}.weight"


def _check_fits(path: Path, weights: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise BackendError unless the weights have the names and shapes of the parameters and are finite."""
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    saved_shapes = {name: tensor.shape for name, tensor in weights.items()}
    names = saved_shapes.keys() | shapes.keys()
    if differing_names := sorted(name for name in names if saved_shapes.get(name) != shapes.get(name)):
        name = differing_names[0]
        raise BackendError(
            f"{path} belongs to a different model or adapter: {len(differing_names)} tensors differ, for "
            f"example {name}: {saved_shapes.get(name, 'missing')} instead of {shapes.get(name, 'missing')}"
        )
    if name := find_non_finite(weights):
        raise NonFiniteError(f"cannot load {path}: {name} is not finite; load an earlier state")


@torch.no_grad()
def _copy_weights(weights: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
        parameter.grad = None


def hash_adapter(path: Path) -> str:
    """Return the SHA-256 (hex) of the names, dtypes, shapes and values of an adapter folder's tensors."""
    digest = hashlib.sha256()
    tensors: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors.update(load_file(file))
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else repr(tensor).encode())
    return digest.hexdigest()


def save_training_state(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, int],
) -> None:
    """Save the weights, unapplied gradients, optimizer moments, RNG state and counters."""
    tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = parameter
        if parameter.grad is not None:
            tensors[f"grad/{name}"] = parameter.grad
        for key, value in cast(dict[str, Tensor], optimizer.state.get(parameter, {})).items():
            tensors[f"{key}/{name}"] = value

    def fill(folder: Path) -> None:
        write_tensors(folder / TENSORS_FILE, tensors)
        metadata = {"format": FORMAT, "counters": dict(counters)}
        (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=1) + "\n")

    write_folder(path, fill)


def load_training_state(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    with_optimizer: bool,
) -> dict[str, int]:
    """Load a saved state and return its counters. If ``with_optimizer`` is False, load only the weights, and
    drop gradients and moments. Raises BackendError, without changing anything, if the state is invalid or
    does not fit the parameters."""
    try:
        metadata = cast(dict[str, Any], json.loads((path / METADATA_FILE).read_text()))
        tensors = load_file(path / TENSORS_FILE)
    except FileNotFoundError as error:
        raise BackendError(f"{path} contains no saved training state: {error.filename} is missing") from error
    except (ValueError, SafetensorError) as error:
        raise BackendError(f"the training state in {path} is damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise BackendError(
            f"{path} has format {metadata.get('format')!r}, but this version of Instar needs format {FORMAT}"
        )
    prefix = "weight/"
    weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    _check_fits(path, weights, parameters)
    _copy_weights(weights, parameters)
    optimizer.state.clear()
    if with_optimizer:
        for name, parameter in parameters.items():
            if (grad := tensors.get(f"grad/{name}")) is not None:
                parameter.grad = grad.to(parameter.device)
        moments = {
            index: {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for index, name in enumerate(parameters)
            if f"step/{name}" in tensors
        }
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["rng/cuda"])
    return cast(dict[str, int], metadata["counters"])
