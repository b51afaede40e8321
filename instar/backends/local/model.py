"""Load the model to train, and reject models for which packed training would be incorrect."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from instar.backends.local.attention import ATTENTION_NAME, TreeAttentionPlan, make_attention_plan
from instar.backends.local.head import target_logprobs
from instar.backends.local.lora import ADAPTER, add_adapter
from instar.backends.local.pack import Index, PackedRow, pack
from instar.backends.local.state import write_adapter_files, write_weights
from instar.config import LocalBackendConfig, ModelConfig
from instar.errors import BackendError
from instar.models import copy_with_shared_weights, device_and_dtype, resolve_model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "attn_logit_softcapping")


@dataclass(frozen=True, slots=True)
class TrainedModel:
    model: PreTrainedModel
    adapter: peft.PeftModel | None
    """None if all weights are trained."""
    folder: Path
    device: str
    dtype: torch.dtype

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def vocab_size(self) -> int:
        return cast(nn.Embedding, self.model.get_input_embeddings()).num_embeddings

    @property
    def max_tokens(self) -> int | None:
        return getattr(self.model.config, "max_position_embeddings", None)

    def logprobs(self, packed: PackedRow, positions: Index) -> Tensor:
        """Return the fp32 logprobs of the tokens at ``positions``, which must not include the first token of
        a sample."""
        plan = make_attention_plan(packed, self.device)
        with self._autocast():
            hidden_states = self._hidden_states(packed, plan)
            rows = hidden_states[self._tensor(packed.previous[positions])]
            head = cast(nn.Module, self.model.get_output_embeddings())
            return target_logprobs(head, rows, self._tensor(packed.token_ids[positions]))

    def _hidden_states(self, packed: PackedRow, plan: TreeAttentionPlan) -> Tensor:
        output = self.model.base_model(
            input_ids=self._tensor(packed.token_ids).unsqueeze(0),
            position_ids=self._tensor(packed.positions).unsqueeze(0),
            use_cache=False,
            tree_plan=plan,
        )
        return cast(Tensor, output.last_hidden_state)[0]

    def _autocast(self) -> AbstractContextManager[object]:
        # Full fine-tuning keeps fp32 weights and computes in bf16. The base model of an adapter is in bf16.
        if self.adapter is None and self.dtype != torch.float32:
            return torch.autocast(self.device, dtype=self.dtype)
        return nullcontext()

    def _tensor(self, array: Index) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def check_attention(self) -> None:
        """Raise BackendError if a layer does not use the packed attention. In such a layer, tokens would
        attend to other samples."""
        packed = pack([np.arange(4, dtype=np.int32)])
        plan = make_attention_plan(packed, self.device)
        with torch.no_grad(), self._autocast():
            self._hidden_states(packed, plan)
        layers = self.model.config.num_hidden_layers
        if plan.calls != layers:
            raise BackendError(
                f"the local backend does not support {type(self.model).__name__}: only "
                f"{plan.calls} of its {layers} layers use an attention that can be packed"
            )

    def write(self, folder: Path) -> None:
        """Write the current weights for engines: a PEFT adapter, or full weights with the tokenizer."""
        if self.adapter is not None:
            weights = peft.get_peft_model_state_dict(self.adapter, save_embedding_layers=False)
            config = cast(dict[str, Any], self.adapter.peft_config[ADAPTER].to_dict())
            write_adapter_files(weights, config, folder)
            return
        # Tied weights are one tensor with two names, which is written under the first name.
        distinct = {tensor.data_ptr(): name for name, tensor in reversed(self.model.state_dict().items())}
        weights = {name: self.model.state_dict()[name].to(self.dtype) for name in distinct.values()}
        write_weights(weights, self.folder, folder, self.dtype)


def load_model(
    config: ModelConfig, backend: LocalBackendConfig, seed: int, base: PreTrainedModel | None = None
) -> TrainedModel:
    """Return the model to train. ``base`` is a model from `load_base`, whose weights are not trained and may
    be shared by several models."""
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
        model.train()
    trained = TrainedModel(model, adapter, folder, device, dtype)
    trained.check_attention()
    return trained


def load_base(config: ModelConfig) -> PreTrainedModel:
    """Return the base model on its device. Several models with adapters may share it."""
    device, dtype_name = device_and_dtype(config)
    model = _read_model(resolve_model(config.name), DTYPES[dtype_name])
    return cast(PreTrainedModel, cast(nn.Module, model).to(device).requires_grad_(False))


def load_reference(config: ModelConfig, backend: LocalBackendConfig) -> TrainedModel:
    """Return the base model with the dtypes of full fine-tuning. Before the first step, its logprobs equal
    those of the trained model bit for bit."""
    full = backend.model_copy(update={"lora": None, "gradient_checkpointing": False})
    return load_model(config, full, seed=0)


def _read_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    _check_supported(cast(PreTrainedConfig, AutoConfig.from_pretrained(folder)))
    with _no_progress_bar():
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model = cast(PreTrainedModel, loaded)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextmanager
def _no_progress_bar() -> Generator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _check_supported(config: PreTrainedConfig) -> None:
    def unsupported(feature: str) -> BackendError:
        return BackendError(f"the local backend does not support {config.model_type} models with {feature}")

    if config.is_encoder_decoder:
        raise unsupported("an encoder")
    layers = cast(list[str], getattr(config, "layer_types", None) or [])
    if other := sorted(set(layers) - {"full_attention"}):
        raise unsupported(f"layers of type {', '.join(other)}")
    if not layers and getattr(config, "sliding_window", None) is not None:
        raise unsupported(f"a sliding window (sliding_window: {config.sliding_window})")
    for name in LOGIT_SETTINGS:
        if getattr(config, name, None) not in (None, 1.0):
            raise unsupported(f"{name}: {getattr(config, name)}")
