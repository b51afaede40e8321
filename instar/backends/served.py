"""The weights that an engine would serve, taken from a module that is trained: whole, sharded, or with an
adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ADAPTER = "default"
BASE = ".base_layer"


def served_weights(causal: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """One after another, named and shaped as in the model's own files, tied weights once. An adapter is
    merged in fp32, or small updates would round away. Where the parameters are sharded, every rank has to
    go through all of them: each is gathered when its turn comes, and is whole on every rank until the next.
    """
    with torch.no_grad():
        adapted = {
            f"{name}.weight": module
            for name, module in causal.named_modules()
            if isinstance(module, LoraLayer) and ADAPTER in module.lora_A
        }
        for held, tensor in _held(causal):
            name = held.replace(f"{BASE}.", ".")
            whole = _whole(tensor)
            if (layer := adapted.get(name)) is not None:
                whole = whole.float() + _delta(layer).to(whole.device)
            yield name, whole.detach().to(dtype)


def adapts_tied_head(causal: nn.Module) -> bool:
    """Whether an adapter changes an output layer that shares its weights with the input: such a model cannot
    be merged, for in the files the two are one."""
    names: dict[int, list[str]] = {}
    for name, tensor in causal.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return any(len(shared) > 1 and any(BASE in name for name in shared) for shared in names.values())


def _held(causal: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = causal.state_dict().keys()
    for name, parameter in causal.named_parameters():
        if ".lora_" not in name:
            yield name, parameter
    for name, buffer in causal.named_buffers():
        if name in kept:
            yield name, buffer


def _delta(layer: LoraLayer) -> Tensor:
    a, b = (_whole(cast(nn.Linear, part[ADAPTER]).weight) for part in (layer.lora_A, layer.lora_B))
    return (b.float() @ a.float()) * float(layer.scaling[ADAPTER])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
