"""Reads PEFT adapter folders as updates of linear layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from instar.engines.local.linear import LoraPair
from instar.errors import EngineError

PREFIX = "base_model.model."
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
)


def read_adapter(folder: Path, model: nn.Module, dtype: torch.dtype, device: str) -> dict[str, LoraPair]:
    """Return the LoRA update of each module, by module name. Raises EngineError for unsupported adapters."""
    halves, scale = read_updates(folder)
    modules = dict(model.named_modules())
    return {name: _pair(name, ab, modules.get(name), scale, dtype, device) for name, ab in halves.items()}


def read_updates(folder: Path) -> tuple[dict[str, dict[str, Tensor]], float]:
    """Return the matrices A and B of each module as stored in the folder, and the scale of B A."""
    try:
        config: dict[str, Any] = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=dict)
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise EngineError(f"The adapter in {folder} cannot be read: {error}") from error
    scale = _scale(config, folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, half = name.removeprefix(PREFIX).rpartition(".lora_")
        if not name.startswith(PREFIX) or half not in ("A.weight", "B.weight"):
            raise EngineError(
                f"The adapter in {folder} holds {name}, which the local engine does not implement"
            )
        halves.setdefault(module, {})[half[0]] = tensor
    return halves, scale


def _scale(config: dict[str, Any], folder: Path) -> float:
    if config.get("peft_type") != "LORA":
        raise EngineError(
            f"The adapter in {folder} is of type {config.get('peft_type')}; only LORA is implemented"
        )
    for name in UNSUPPORTED:
        if config.get(name):
            raise EngineError(
                f"The adapter in {folder} uses {name}, which the local engine does not implement"
            )
    if config.get("bias", "none") != "none":
        raise EngineError(f"The adapter in {folder} trains biases, which the local engine does not implement")
    # These settings change the base weights at the start, and the adapter's folder does not contain the
    # change.
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(("pissa", "olora", "loftq", "corda", "lora_ga")):
        raise EngineError(
            f"The adapter in {folder} was initialized by {start}, which the local engine does not implement"
        )
    rank = float(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pair(
    name: str,
    halves: dict[str, Tensor],
    module: nn.Module | None,
    scale: float,
    dtype: torch.dtype,
    device: str,
) -> LoraPair:
    if not isinstance(module, nn.Linear):
        raise EngineError(f"The adapter adapts {name}, which is no linear layer of this model")
    if halves.keys() != {"A", "B"}:
        raise EngineError(f"The adapter has only one of lora_A and lora_B for {name}")
    down, up = halves["A"], halves["B"].float().T * scale
    if down.shape[1] != module.in_features or up.shape[1] != module.out_features or len(down) != len(up):
        raise EngineError(f"The adapter's update of {name} does not have that layer's shape")
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise EngineError(f"The adapter's update of {name} is not finite")
    return LoraPair(down.to(device, dtype).contiguous(), up.to(device, dtype).contiguous())
