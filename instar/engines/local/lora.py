"""Linear layers with a LoRA update that is never merged, and PEFT adapters for these layers. Loading an
adapter copies only its own matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from instar.adapters import PEFT_PREFIX, WEIGHTS_FILE, read_adapter_settings
from instar.errors import EngineError

# These operators are internal to torch's compiler, and some builds do not have them.
_MKLDNN_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
_has_mkldnn = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in _MKLDNN_OPERATORS
)
MKLDNN: Any = torch.ops.mkldnn if _has_mkldnn else None


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The LoRA update of one layer: x → (x @ down.T) @ up. ``up`` includes the scale."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[rank, out]"""


class RowMasks:
    """The masks of the rows of the layers' input in the current step, one for each pair of a layer. A mask is
    boolean [rows, rank or 1] and hides the parts of the low-rank product that do not belong to a row's
    adapter. There are none if all rows have the same adapter."""

    def __init__(self) -> None:
        self.values: Sequence[Tensor] = ()


class EngineLinear(nn.Linear):
    """A linear layer with LoRA updates. ``packed`` is a second copy of a bf16 weight in the layout that the
    CPU kernels use, or None."""

    pairs: Sequence[LoraPair | None]
    masks: RowMasks
    packed: Tensor | None

    @classmethod
    def from_linear(cls, base: nn.Linear) -> EngineLinear:
        layer = cls(1, 1, bias=False, device="meta")
        layer.in_features, layer.out_features = base.in_features, base.out_features
        layer.weight, layer.bias = base.weight, base.bias
        layer.pairs = ()
        layer.masks = RowMasks()
        # A buffer, so that models that share their weights also share the packed copy.
        layer.register_buffer("packed", None, persistent=False)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is None:
            output = F.linear(input, self.weight, self.bias)
        else:
            output = MKLDNN._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        for index, pair in enumerate(self.pairs):
            if pair is not None:
                low_rank = F.linear(input.reshape(-1, self.in_features), pair.down)
                if self.masks.values:
                    low_rank.masked_fill_(self.masks.values[index], 0.0)
                output.view(-1, self.out_features).addmm_(low_rank, pair.up)
        return output


def replace_linears(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, EngineLinear.from_linear(child))


def pack_weights(model: nn.Module) -> None:
    """Copy bf16 weights to the layout that the CPU kernels use, if there is one. This reduces the time of a
    decoding step with few rows by 10 to 60%, with the same results."""
    if MKLDNN is None or not MKLDNN._is_mkldnn_bf16_supported():
        return
    for module in model.modules():
        if isinstance(module, EngineLinear):
            weight = module.weight.detach()
            if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
                module.packed = MKLDNN._reorder_linear_weight(weight, 16)


def read_adapter(folder: Path, model: nn.Module, dtype: torch.dtype, device: str) -> dict[str, LoraPair]:
    """Return the LoRA update of each module by name. Raises EngineError if the adapter cannot be read, is not
    supported or does not fit the model."""
    updates, scale = read_updates(folder)
    modules = dict(model.named_modules())
    adapter: dict[str, LoraPair] = {}
    for name, matrices in updates.items():
        module = modules.get(name)
        if not isinstance(module, EngineLinear):
            raise EngineError(f"The adapter updates {name}, which is not a linear layer of this model.")
        check_update(name, matrices, (module.out_features, module.in_features))
        down, up = matrices["A"], matrices["B"].float().T * scale
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise EngineError(f"The adapter's update of {name} contains NaN or infinite values.")
        adapter[name] = LoraPair(down.to(device, dtype).contiguous(), up.to(device, dtype).contiguous())
    return adapter


def read_updates(folder: Path) -> tuple[dict[str, dict[str, Tensor]], float]:
    """Return the matrices A and B of each module, and the scale of their product B A. Raises EngineError if
    the adapter cannot be read or is not supported."""
    try:
        settings = read_adapter_settings(folder)
        tensors = load_file(folder / WEIGHTS_FILE)
    except ValueError as error:
        raise EngineError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise EngineError(f"The adapter in {folder} cannot be read: {error}") from error
    updates: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, matrix = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if not name.startswith(PEFT_PREFIX) or matrix not in ("A.weight", "B.weight"):
            raise EngineError(f"The adapter in {folder} contains {name}, which Instar does not support.")
        updates.setdefault(module, {})[matrix[0]] = tensor
    return updates, settings.alpha / settings.rank


def check_update(name: str, matrices: dict[str, Tensor], weight_shape: tuple[int, ...]) -> None:
    """Raise EngineError unless A and B exist and their product B A has the shape of the layer's weight."""
    if matrices.keys() != {"A", "B"}:
        raise EngineError(f"The adapter's update of {name} is incomplete; it must have lora_A and lora_B.")
    a_shape, b_shape = tuple(matrices["A"].shape), tuple(matrices["B"].shape)
    if (b_shape[0], a_shape[1]) != weight_shape or b_shape[1] != a_shape[0]:
        raise EngineError(
            f"The adapter's update of {name} has shapes {b_shape} × {a_shape}, but the layer's weight has "
            f"shape {weight_shape}."
        )
