"""Load the model to train, and compute logprobs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from instar.backends.local.attention import ATTENTION_NAME, TreeAttentionPlan, make_attention_plan
from instar.backends.local.lora import add_adapter
from instar.backends.local.pack import IntArray, PackedRow, pack
from instar.backends.local.state import write_adapter_files, write_weights
from instar.backends.weight_export import ADAPTER
from instar.config import LocalBackendConfig, ModelConfig
from instar.errors import BackendError
from instar.models import copy_with_shared_weights, device_and_dtype, get_max_positions, resolve_model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHUNK_TOKENS = 256
"""The maximum number of tokens whose logits are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    model: PreTrainedModel
    adapter: peft.PeftModel | None
    """None if all weights are trained."""
    folder: Path
    device: str
    dtype: torch.dtype
    pauses: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """The functions that are called between parts of a computation, and block while it must pause."""

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def vocab_size(self) -> int:
        return cast(nn.Embedding, self.model.get_input_embeddings()).num_embeddings

    @property
    def max_tokens(self) -> int | None:
        return get_max_positions(self.model.config)

    def compute_logprobs(self, packed: PackedRow, positions: IntArray) -> Tensor:
        """Return the fp32 logprobs at these row positions, which must not include a sample's first token."""
        plan = make_attention_plan(packed, self.device, self.dtype)
        with self._autocast():
            hidden_states = self._compute_hidden_states(packed, plan)
            rows = hidden_states[self._to_tensor(packed.previous[positions])] * self._get_logit_scale()
            head = cast(nn.Module, self.model.get_output_embeddings())
            targets = self._to_tensor(packed.token_ids[positions])
            cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
            return _compute_target_logprobs(head, rows, targets, self._pause, cap)

    def _get_logit_scale(self) -> float:
        config = self.model.config.get_text_config()
        return getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)

    def pause_between_layers(self, pause: Callable[[], None]) -> None:
        """Call ``pause`` before every linear layer, in the forward and the backward pass, and between chunks
        of the output layer. On a GPU, the operations that were already submitted still run."""
        self.pauses.append(pause)

        def before_forward(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            pause()
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
                inputs[0].register_hook(before_backward)

        def before_backward(_: Tensor) -> None:
            pause()

        for module in self.model.modules():
            if isinstance(module, nn.Linear | peft.tuners.lora.layer.Linear):
                module.register_forward_pre_hook(before_forward)

    def _pause(self) -> None:
        for pause in self.pauses:
            pause()

    def _compute_hidden_states(self, packed: PackedRow, plan: TreeAttentionPlan) -> Tensor:
        output = self.model.base_model(
            input_ids=self._to_tensor(packed.token_ids).unsqueeze(0),
            position_ids=self._to_tensor(packed.positions).unsqueeze(0),
            use_cache=False,
            tree_plan=plan,
        )
        return cast(Tensor, output.last_hidden_state)[0]

    def _autocast(self) -> AbstractContextManager[object]:
        # Only full fine-tuning keeps fp32 weights. The base model of an adapter is already in this dtype.
        if self.adapter is None and self.dtype != torch.float32:
            return torch.autocast(self.device, dtype=self.dtype)
        return nullcontext()

    def _to_tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def check_attention(self) -> None:
        """Raise BackendError if a layer has another attention, in which tokens attend to other samples."""
        packed = pack([np.arange(4, dtype=np.int32)])
        plan = make_attention_plan(packed, self.device, self.dtype)
        with torch.no_grad(), self._autocast():
            self._compute_hidden_states(packed, plan)
        layer_count = self.model.config.get_text_config().num_hidden_layers
        if plan.calls != layer_count:
            raise BackendError(
                f"Its {layer_count} layers call attention that supports packing {plan.calls} times"
            )

    def write(self, folder: Path) -> None:
        """Write the current weights for engines: a PEFT adapter, or full weights, config and tokenizer."""
        if self.adapter is not None:
            weights = peft.get_peft_model_state_dict(self.adapter, save_embedding_layers=False)
            config = cast(dict[str, Any], self.adapter.peft_config[ADAPTER].to_dict())
            write_adapter_files(weights, config, folder)
            return
        # Tied weights are one tensor with two names, which is written under the first name.
        names = {tensor.data_ptr(): name for name, tensor in reversed(self.model.state_dict().items())}
        weights = {name: self.model.state_dict()[name].to(self.dtype) for name in names.values()}
        write_weights(weights, self.folder, folder, self.dtype)


def load_model(
    config: ModelConfig, backend: LocalBackendConfig, seed: int, base: PreTrainedModel | None = None
) -> TrainedModel:
    """Return the model to train. ``base`` is a model from `load_base`, whose frozen weights several models
    with adapters can share. If it is None, the weights are loaded from disk."""
    folder = resolve_model(config.name)
    device, dtype_name = device_and_dtype(config)
    dtype = DTYPES[dtype_name]
    if base is None:
        model = _read_model(folder, dtype if backend.lora is not None else torch.float32)
    else:
        model = cast(PreTrainedModel, copy_with_shared_weights(base))
    adapter = add_adapter(model, backend.lora, folder, seed) if backend.lora is not None else None
    cast(nn.Module, model).to(device)
    model.eval()
    if backend.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # required for checkpointing; has no other effect, because all dropout is 0
    trained_model = TrainedModel(model, adapter, folder, device, dtype)
    trained_model.check_attention()
    return trained_model


def load_base(config: ModelConfig) -> PreTrainedModel:
    """Return the frozen base model on its device. Several models with adapters can share it."""
    device, dtype_name = device_and_dtype(config)
    model = _read_model(resolve_model(config.name), DTYPES[dtype_name])
    return cast(PreTrainedModel, cast(nn.Module, model).to(device).requires_grad_(False))


def load_reference(config: ModelConfig, backend: LocalBackendConfig) -> TrainedModel:
    """Return the base model with the dtypes of full fine-tuning. Before the first step, it computes the same
    logprobs as the trained model, bit for bit."""
    full_config = backend.model_copy(update={"lora": None, "gradient_checkpointing": False})
    return load_model(config, full_config, seed=0)


def _read_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return prepare_model(cast(PreTrainedModel, loaded))


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Let the model use the backend's attention and no dropout."""
    model.set_attn_implementation(ATTENTION_NAME)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _compute_target_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, pause: Callable[[], None], cap: float | None
) -> Tensor:
    """Return the fp32 logprob of each ``targets[i]`` given ``hidden[i]``: the target's logit minus the
    logsumexp of all logits at this position. Call ``pause`` between chunks. ``cap`` limits the logits."""
    if type(head) is nn.Linear and not head.weight.requires_grad and cap is None:
        return cast(Tensor, _FrozenHead.apply(hidden, targets, head.weight, head.bias, pause))
    chunks = zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_compute_chunk_logprobs(head, rows, ids, cap) for rows, ids in chunks])
    # Leave torch's generator alone: the chunks use no randomness, and another model may be using it.
    parts = [
        checkpoint(
            _compute_chunk_logprobs, head, rows, ids, cap, use_reentrant=False, preserve_rng_state=False
        )
        for rows, ids in chunks
    ]
    return torch.cat(cast(list[Tensor], parts))


def _compute_chunk_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    logits = cast(Tensor, head(hidden)).float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


class _FrozenHead(torch.autograd.Function):
    """Computes logprobs with a frozen output layer. With respect to the hidden state, a logprob's gradient is
    W[target] - Σ p·W for the softmax p. It is independent of the loss, so the forward pass computes it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pause: Callable[[], None],
    ) -> Tensor:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprob_grads = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), CHUNK_TOKENS):
            pause()
            rows = slice(start, start + CHUNK_TOKENS)
            logits = nn.functional.linear(hidden[rows], weight, bias)
            target_logits = logits.gather(-1, targets[rows].unsqueeze(-1)).float()
            top_logits, top_ids = logits.max(-1, keepdim=True)
            probs = torch.softmax(logits, -1, dtype=torch.float32)
            # logsumexp = top - log p[top]. torch's own logsumexp is ten times slower on a CPU.
            logprobs[rows] = (target_logits - top_logits.float() + probs.gather(-1, top_ids).log()).squeeze(
                -1
            )
            if logprob_grads is not None:
                logprob_grads[rows] = weight[targets[rows]] - probs.to(weight.dtype) @ weight
        ctx.save_for_backward(logprob_grads)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (logprob_grads,) = ctx.saved_tensors
        return (logprob_grads * grads[0].unsqueeze(-1)).to(logprob_grads.dtype), None, None, None, None
