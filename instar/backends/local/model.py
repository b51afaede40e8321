"""Loads the model to train, and rejects models that packed training would compute incorrectly."""

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

from instar.backends.local.attention import NAME, TreeAttentionPlan, make_attention_plan
from instar.backends.local.head import target_logprobs
from instar.backends.local.lora import ADAPTER, add_adapter
from instar.backends.local.pack import PackedRow, pack
from instar.backends.local.state import write_adapter_files, write_weights
from instar.config import LocalBackendConfig, ModelConfig
from instar.errors import BackendError
from instar.models import device_and_dtype, resolve_model, share_weights

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "attn_logit_softcapping")


@dataclass(frozen=True, slots=True)
class TrainedModel:
    causal: PreTrainedModel
    adapter: peft.PeftModel | None
    """None if all weights are trained."""
    folder: Path
    device: str
    dtype: torch.dtype

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.causal.named_parameters() if p.requires_grad}

    @property
    def vocab_size(self) -> int:
        return cast(nn.Embedding, self.causal.get_input_embeddings()).num_embeddings

    @property
    def max_tokens(self) -> int | None:
        return getattr(self.causal.config, "max_position_embeddings", None)

    def logprobs(self, packed: PackedRow, positions: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        """Return the fp32 logprobs of the tokens at ``positions``. None of them may be the first token of a
        sample."""
        plan = make_attention_plan(packed, self.device)
        with self._precision():
            hidden = self._hidden(packed, plan)
            rows = hidden[self._tensor(packed.previous[positions])]
            head = cast(nn.Module, self.causal.get_output_embeddings())
            return target_logprobs(head, rows, self._tensor(packed.token_ids[positions]))

    def _hidden(self, packed: PackedRow, plan: TreeAttentionPlan) -> Tensor:
        output = self.causal.base_model(
            input_ids=self._tensor(packed.token_ids).unsqueeze(0),
            position_ids=self._tensor(packed.positions).unsqueeze(0),
            use_cache=False,
            tree_plan=plan,
        )
        return cast(Tensor, output.last_hidden_state)[0]

    def _precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of a pass. Full fine-tuning keeps fp32 weights and computes in bf16;
        the base model of an adapter already is bf16."""
        if self.adapter is None and self.dtype != torch.float32:
            return torch.autocast(self.device, dtype=self.dtype)
        return nullcontext()

    def _tensor(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def check_attention(self) -> None:
        """Raise BackendError unless all layers use the packed attention. With any other attention, tokens
        would attend to other samples."""
        packed = pack([np.arange(4, dtype=np.int32)])
        plan = make_attention_plan(packed, self.device)
        with torch.no_grad(), self._precision():
            self._hidden(packed, plan)
        layers = self.causal.config.num_hidden_layers
        if plan.calls != layers:
            raise BackendError(
                f"the local backend does not support {type(self.causal).__name__}: only "
                f"{plan.calls} of its {layers} layers use the attention that can be packed"
            )

    def write(self, folder: Path) -> None:
        """Write the current weights for engines, as PEFT adapter files or as full weights with the
        tokenizer."""
        if self.adapter is not None:
            write_adapter(self.adapter, folder)
            return
        # Tied weights are one tensor with two names and are written under the first.
        distinct = {tensor.data_ptr(): name for name, tensor in reversed(self.causal.state_dict().items())}
        weights = {name: self.causal.state_dict()[name].to(self.dtype) for name in distinct.values()}
        write_weights(weights, self.folder, folder, self.dtype)


def write_adapter(adapter: peft.PeftModel, folder: Path) -> None:
    weights = peft.get_peft_model_state_dict(adapter, save_embedding_layers=False)
    write_adapter_files(weights, cast(dict[str, Any], adapter.peft_config[ADAPTER].to_dict()), folder)


def load_model(
    model: ModelConfig, config: LocalBackendConfig, seed: int, base: PreTrainedModel | None = None
) -> TrainedModel:
    """Return the model to train. ``base``, from `load_base`, has the weights that are not trained; several
    models may share it."""
    folder = resolve_model(model.name)
    device, dtype_name = device_and_dtype(model)
    dtype = DTYPES[dtype_name]
    if base is None:
        causal = _read(folder, dtype if config.lora is not None else torch.float32)
    else:
        causal = cast(PreTrainedModel, share_weights(base))
    adapter = add_adapter(causal, config.lora, folder, seed) if config.lora is not None else None
    cast(nn.Module, causal).to(device)
    causal.eval()
    if config.gradient_checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        causal.train()
    trained = TrainedModel(causal, adapter, folder, device, dtype)
    trained.check_attention()
    return trained


def load_base(model: ModelConfig) -> PreTrainedModel:
    """Return the base model on its device. Several models with adapters may share it."""
    device, dtype_name = device_and_dtype(model)
    causal = _read(resolve_model(model.name), DTYPES[dtype_name])
    return cast(PreTrainedModel, cast(nn.Module, causal).to(device).requires_grad_(False))


def _read(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    _check_supported(cast(PreTrainedConfig, AutoConfig.from_pretrained(folder)))
    with _no_progress_bar():
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME)
    causal = cast(PreTrainedModel, loaded)
    for module in causal.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return causal


def load_frozen(model: ModelConfig, config: LocalBackendConfig) -> TrainedModel:
    """Return the base model with the dtypes of full fine-tuning, so that its logprobs equal those of the
    trained model bit for bit before the first step."""
    plain = config.model_copy(update={"lora": None, "gradient_checkpointing": False})
    return load_model(model, plain, seed=0)


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
    """Raise BackendError for features that the packed attention and the chunked head do not support."""

    def unsupported(what: str) -> BackendError:
        return BackendError(f"the local backend does not support {config.model_type} models with {what}")

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
