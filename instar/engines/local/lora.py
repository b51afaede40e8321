"""LoRA beside the base weights: never merged, so swapping an adapter moves only its own few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

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


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The update of one module: x → (x @ down.T) @ up, scale included."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[rank, out]"""


class LoraLinear(nn.Linear):
    """Takes the place of a Linear and shares its weight; parameter names stay as they were."""

    pair: LoraPair | None

    @classmethod
    def over(cls, base: nn.Linear) -> LoraLinear:
        wrapped = cls(1, 1, bias=False, device="meta")
        wrapped.in_features, wrapped.out_features = base.in_features, base.out_features
        wrapped.weight, wrapped.bias = base.weight, base.bias
        wrapped.pair = None
        return wrapped

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        if self.pair is None:
            return output
        low = F.linear(input.reshape(-1, self.in_features), self.pair.down)
        output.view(-1, self.out_features).addmm_(low, self.pair.up)
        return output


def read_adapter(folder: Path, model: nn.Module, dtype: torch.dtype, device: str) -> dict[str, LoraPair]:
    """A PEFT adapter folder → the update of each module, by the module's name. Refuses what this
    engine does not compute."""
    try:
        config: dict[str, Any] = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=dict)
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise EngineError(f"cannot read the adapter in {folder}: {error}") from error
    scale = _scale(config, folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, half = name.removeprefix(PREFIX).rpartition(".lora_")
        if not name.startswith(PREFIX) or half not in ("A.weight", "B.weight"):
            raise EngineError(
                f"the adapter in {folder} holds {name}, which the local engine does not implement"
            )
        halves.setdefault(module, {})[half[0]] = tensor
    modules = dict(model.named_modules())
    return {name: _pair(name, ab, modules.get(name), scale, dtype, device) for name, ab in halves.items()}


def install(model: nn.Module, adapter: dict[str, LoraPair]) -> None:
    """Put the adapter in place of the one before; an empty one leaves the base model."""
    for name in adapter:
        parent = model.get_submodule(name.rpartition(".")[0])
        attribute = name.rpartition(".")[2]
        module = getattr(parent, attribute)
        if not isinstance(module, LoraLinear):
            setattr(parent, attribute, LoraLinear.over(module))
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            module.pair = adapter.get(name)


def _scale(config: dict[str, Any], folder: Path) -> float:
    if config.get("peft_type") != "LORA":
        raise EngineError(
            f"the adapter in {folder} is of type {config.get('peft_type')}; only LORA is implemented"
        )
    for name in UNSUPPORTED:
        if config.get(name):
            raise EngineError(
                f"the adapter in {folder} uses {name}, which the local engine does not implement"
            )
    if config.get("bias", "none") != "none":
        raise EngineError(f"the adapter in {folder} trains biases, which the local engine does not implement")
    # These begin by changing the base weights, which the adapter's folder does not hold.
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(("pissa", "olora", "loftq", "corda", "lora_ga")):
        raise EngineError(
            f"the adapter in {folder} was begun by {start}, which the local engine does not implement"
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
        raise EngineError(f"the adapter adapts {name}, which is no linear layer of this model")
    if halves.keys() != {"A", "B"}:
        raise EngineError(f"the adapter lacks half of its update of {name}")
    down, up = halves["A"], halves["B"].float().T * scale
    if down.shape[1] != module.in_features or up.shape[1] != module.out_features or len(down) != len(up):
        raise EngineError(f"the adapter's update of {name} does not have that layer's shape")
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise EngineError(f"the adapter's update of {name} is not finite")
    return LoraPair(down.to(device, dtype).contiguous(), up.to(device, dtype).contiguous())
