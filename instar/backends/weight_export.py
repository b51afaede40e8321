"""Export the weights of a trained model for engines. The model may be sharded or have an adapter."""

# torch has no public API for persistent buffers.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ADAPTER = "default"
BASE_LAYER_SUFFIX = ".base_layer"


@torch.no_grad()
def iterate_served_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in ``dtype``, with the names and shapes of the model's files, and tied weights once.
    An adapter is merged in fp32, because rounding would remove small updates. If the parameters are sharded,
    every rank must iterate over all weights. They are gathered one at a time, and each is valid on every rank
    until the next one is requested."""
    for name, tensor, layer in _iterate_saved_tensors(model):
        weight = _gather(tensor)
        if layer is not None:
            factors = (layer.lora_A, layer.lora_B)
            a, b = (_gather(cast(nn.Linear, factor[ADAPTER]).weight) for factor in factors)
            a, b = a.to(weight.device).float(), b.to(weight.device).float()
            weight = torch.addmm(weight.float(), b, a, alpha=float(layer.scaling[ADAPTER]))
        yield name, weight.detach().to(dtype)


def has_adapter_on_tied_head(model: nn.Module) -> bool:
    """Return True if an adapter changes an output layer that shares its weights with the input embedding.
    Such an adapter cannot be merged, because the model's files contain the two layers as one weight."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return any(len(tied) > 1 and any(BASE_LAYER_SUFFIX in name for name in tied) for tied in names.values())


def _iterate_saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, LoraLayer | None]]:
    """Yield the tensors that the model's files contain, each with the LoRA layer that adapts it, or None. The
    modules are traversed only once, because a traversal takes longer than merging on a GPU."""
    adapters: dict[str, LoraLayer] = {}
    seen_ids: set[int] = set()
    for path, module in model.named_modules():
        if ".lora_" in path:
            continue
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            adapters[path] = module
        typed_module = cast(nn.Module, module)  # undoes the narrowing to LoraLayer, which is untyped
        for name, tensor in {**typed_module._parameters, **typed_module._buffers}.items():
            if tensor is None or name in typed_module._non_persistent_buffers_set or id(tensor) in seen_ids:
                continue
            seen_ids.add(id(tensor))
            layer = adapters.get(path.removesuffix(BASE_LAYER_SUFFIX)) if name == "weight" else None
            yield f"{path}.{name}".replace(f"{BASE_LAYER_SUFFIX}.", "."), tensor, layer


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
