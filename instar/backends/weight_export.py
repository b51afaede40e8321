"""Exports the weights that an engine would serve from a module in training. The module may be sharded or have
an adapter."""

# torch has no public API for the buffers that are saved.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ADAPTER = "default"
BASE = ".base_layer"


@torch.no_grad()
def iterate_served_weights(causal: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the names and shapes of the model's files, tied weights once. An adapter is
    merged in fp32, because small updates would be lost to rounding. If the parameters are sharded, every rank
    must iterate over all weights: each weight is gathered in turn, and is valid on every rank until the next
    one."""
    for name, tensor, layer in _iterate_saved(causal):
        weight = _gather(tensor)
        if layer is not None:
            weight = _merge(weight, layer)
        yield name, weight.detach().to(dtype)


def has_adapter_on_tied_head(causal: nn.Module) -> bool:
    """Return True if an adapter changes an output layer that shares its weights with the input embedding.
    Such a model cannot be merged, because its files contain the two as one weight."""
    names: dict[int, list[str]] = {}
    for name, tensor in causal.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return any(len(shared) > 1 and any(BASE in name for name in shared) for shared in names.values())


def _iterate_saved(causal: nn.Module) -> Iterator[tuple[str, Tensor, LoraLayer | None]]:
    """Yield the weights that the model's files contain, each with the layer that adapts it. The modules are
    traversed only once, because on a GPU a traversal takes longer than merging."""
    adapters: dict[str, LoraLayer] = {}
    seen: set[int] = set()
    for path, module in causal.named_modules():
        if ".lora_" in path:
            continue
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            adapters[path] = module
        for part, tensor in _own_tensors(cast(nn.Module, module)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                layer = adapters.get(path.removesuffix(BASE)) if part == "weight" else None
                yield f"{path}.{part}".replace(f"{BASE}.", "."), tensor, layer


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's own parameters, and the buffers that are saved with it."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _merge(weight: Tensor, layer: LoraLayer) -> Tensor:
    a, b = (_gather(cast(nn.Linear, part[ADAPTER]).weight) for part in (layer.lora_A, layer.lora_B))
    scaling = float(layer.scaling[ADAPTER])
    device = weight.device
    return torch.addmm(weight.float(), b.to(device).float(), a.to(device).float(), alpha=scaling)


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
