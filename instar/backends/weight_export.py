"""The weights that an engine would serve, taken from a module that is trained: whole, sharded, or with an
adapter."""

# torch has no public way to tell which buffers are saved.
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
    """One after another, named and shaped as in the model's own files, tied weights once. An adapter is
    merged in fp32, or small updates would round away. Where the parameters are sharded, every rank has to
    go through all of them: each is gathered when its turn comes, and is whole on every rank until the next.
    """
    for name, tensor, layer in _held(causal):
        whole = _whole(tensor)
        if layer is not None:
            whole = _merged(whole, layer)
        yield name, whole.detach().to(dtype)


def has_adapter_on_tied_head(causal: nn.Module) -> bool:
    """Whether an adapter changes an output layer that shares its weights with the input: such a model cannot
    be merged, for in the files the two are one."""
    names: dict[int, list[str]] = {}
    for name, tensor in causal.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return any(len(shared) > 1 and any(BASE in name for name in shared) for shared in names.values())


def _held(causal: nn.Module) -> Iterator[tuple[str, Tensor, LoraLayer | None]]:
    """What the files hold, each with the layer that adapts it. One walk over the modules: on a GPU, walks
    take longer than the merging."""
    adapting: dict[str, LoraLayer] = {}
    seen: set[int] = set()
    for path, module in causal.named_modules():
        if ".lora_" in path:
            continue
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            adapting[path] = module
        for part, tensor in _own(cast(nn.Module, module)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                layer = adapting.get(path.removesuffix(BASE)) if part == "weight" else None
                yield f"{path}.{part}".replace(f"{BASE}.", "."), tensor, layer


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's parameters, and those of its buffers that are saved with it."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _merged(whole: Tensor, layer: LoraLayer) -> Tensor:
    a, b = (_whole(cast(nn.Linear, part[ADAPTER]).weight) for part in (layer.lora_A, layer.lora_B))
    scaling = float(layer.scaling[ADAPTER])
    return torch.addmm(whole.float(), b.to(whole.device).float(), a.to(whole.device).float(), alpha=scaling)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
