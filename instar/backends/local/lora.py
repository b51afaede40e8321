"""LoRA adapters in PEFT's file format, computed by one fused function.

PEFT's own forward pass casts activations to the adapter's fp32 and adds in fp32, which costs more than the
low-rank product itself. Here the fp32 adapter is cast to the dtype of the activations, and its output is
added in place.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import peft
import torch
from peft.tuners.lora.layer import Linear, LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from instar.adapters import PEFT_PREFIX
from instar.backends.weight_export import ADAPTER
from instar.config import LoraConfig
from instar.errors import BackendError


def add_adapter(model: PreTrainedModel, config: LoraConfig, folder: Path, seed: int) -> peft.PeftModel:
    """Wrap the model with an fp32 adapter that is initialized from the seed, and freeze the base weights."""
    targets = _list_linear_layers(model) if config.targets == "all-linear" else list(config.targets)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=cast(int, config.alpha),
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                # PEFT warns of targets that are refused below. With tied embeddings, it warns that an adapter
                # changes only the output layer, which is intended.
                warnings.simplefilter("ignore")
                wrapped = cast(peft.PeftModel, peft.get_peft_model(model, lora, autocast_adapter_dtype=True))
        except ValueError as error:
            raise BackendError(
                f"backend.lora.targets: PEFT cannot adapt {config.targets!r} ({error}); name linear layers "
                "of the model, or use all-linear"
            ) from error
    for name, module in wrapped.named_modules():
        if isinstance(module, Linear) and _can_fuse(module):
            module.forward = partial(_forward, module)
        elif isinstance(module, LoraLayer):
            raise BackendError(
                f"backend.lora.targets: {name.removeprefix(PEFT_PREFIX)} is a "
                f"{type(module.get_base_layer()).__name__}, but engines serve only adapters of linear "
                "layers; name these, or set backend.lora to null"
            )
    return wrapped


def _list_linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers except the output layer. In some models with experts, PEFT takes
    the names of other linear layers for those of experts, whose adapters engines cannot serve."""
    head = model.get_output_embeddings()
    modules = cast(nn.Module, model).named_modules()
    names = [name for name, module in modules if type(module) is nn.Linear and module is not head]
    if not names:
        raise BackendError(
            f"backend.lora.targets: {type(model).__name__} has no linear layers; set backend.lora to null"
        )
    converted = peft.LoraConfig(target_modules=names)
    convert_peft_config_for_transformers(converted, model, None)
    return sorted(cast(set[str], converted.target_modules))


def _can_fuse(module: Linear) -> bool:
    return (
        type(module.get_base_layer()) is nn.Linear
        and not module.lora_variant
        and not module.fan_in_fan_out
        and isinstance(module.lora_dropout[ADAPTER], nn.Identity)
    )


def _forward(module: Linear, x: Tensor, *_: Any, **__: Any) -> Tensor:
    base = cast(nn.Linear, module.get_base_layer())
    if module.disable_adapters:
        return base(x)
    a = cast(nn.Linear, module.lora_A[ADAPTER]).weight
    b = cast(nn.Linear, module.lora_B[ADAPTER]).weight
    return cast(Tensor, _LoraLinear.apply(x, base.weight, base.bias, a, b, float(module.scaling[ADAPTER])))


class _LoraLinear(torch.autograd.Function):
    """Computes x·Wᵀ + bias + scale · x·Aᵀ·Bᵀ, without gradients for W and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        a, b = a.to(x.dtype), b.to(x.dtype)
        flat = x.reshape(-1, x.shape[-1])
        low_rank = flat @ a.T
        out = nn.functional.linear(flat, weight, bias)
        out.addmm_(low_rank, b.T, alpha=scale)
        ctx.save_for_backward(flat, weight, a, b, low_rank)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, a, b, low_rank = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_low_rank = (grad @ b).mul_(ctx.scale)
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low_rank, a).view(ctx.shape)
        grad_a = (grad_low_rank.T @ flat).float()
        grad_b = (low_rank.T @ grad).T.float().mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None
