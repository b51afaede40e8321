"""The engine's transformers model: loading, weight changes and the forward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from instar.config import ModelConfig
from instar.engines.local import attention
from instar.engines.local.linear import LoraPair, install_adapter, pack_weights, replace_linears
from instar.engines.local.lora import read_adapter
from instar.engines.local.rows import KVShape
from instar.errors import EngineError
from instar.models import copy_with_shared_weights, device_and_dtype, resolve_model
from instar.types import Policy

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """A policy that was read from disk and can be applied between two steps."""

    version: int
    adapter: dict[str, LoraPair]
    source: Path
    """The folder of the full weights under the adapter."""
    state: dict[str, Tensor] | None
    """The full weights in ``source``; None if they are already loaded."""


class EngineModel:
    """The transformers model that an engine serves. ``base`` is an already loaded model; its tensors are
    shared, not copied."""

    def __init__(self, config: ModelConfig, base: Any = None) -> None:
        transformers_logging.disable_progress_bar()
        self.device, dtype = device_and_dtype(config)
        self.dtype = DTYPES[dtype]
        self.folder = resolve_model(config.name)
        self._source = self.folder
        self._model = _load_model(self.folder, self.dtype) if base is None else _prepare_shared_model(base)
        self._model.to(self.device)
        replace_linears(self._model)
        pack_weights(self._model)
        self.vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        text_config = self._model.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None) or config.max_context
        self.max_context = min(config.max_context, positions)
        self.kv_shape = self._probe(text_config.num_hidden_layers)

    def share(self) -> EngineModel:
        """Return a model with the same weights but its own adapters. Loading full weights into one affects
        both."""
        shared = copy.copy(self)
        shared._model = copy_with_shared_weights(self._model)
        return shared

    def eos_ids(self) -> set[int]:
        """Return the ids that end a reply, collected from all of the model's files."""
        eos_ids: set[int] = set()
        for config in (self._model.generation_config, self._model.config):
            ids = getattr(config, "eos_token_id", None)
            eos_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return eos_ids

    def forward(self, ids: Tensor, positions: Tensor, sampled: Tensor, plan: attention.StepPlan) -> Tensor:
        """Run the model and return the logits [len(sampled), vocabulary] at the token indices ``sampled``."""
        return self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sampled,
            instar_plan=plan,
        ).logits[0]

    def read(self, policy: Policy) -> PolicyUpdate:
        """Return the contents of a policy's files. Does not change the model, so ``forward`` may run at the
        same time."""
        kind, path = policy.artifact.kind, Path(policy.artifact.path)
        if kind not in ("base", "adapter", "weights"):
            raise EngineError(f"The local engine loads base, adapter and weights, not {kind}.")
        source = path.resolve() if kind == "weights" else self.folder
        adapter = read_adapter(path, self._model, self.dtype, self.device) if kind == "adapter" else {}
        # Full weights are read again even if this folder is already loaded: its files may have changed.
        state = self._read_state(source) if kind == "weights" or source != self._source else None
        return PolicyUpdate(policy.version, adapter, source, state)

    def apply(self, change: PolicyUpdate) -> None:
        if change.state is not None:
            self._model.load_state_dict(change.state)
            self._source = change.source
            pack_weights(self._model)
        install_adapter(self._model, change.adapter)

    def _read_state(self, folder: Path) -> dict[str, Tensor]:
        try:
            state: dict[str, Tensor] = _load_model(folder, self.dtype).state_dict()
        except (OSError, ValueError) as error:
            raise EngineError(f"The weights in {folder} cannot be read: {error}") from error
        ours: dict[str, Tensor] = self._model.state_dict()
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in ours.items()}:
            raise EngineError(f"The weights in {folder} are of another architecture.")
        return state

    def _probe(self, layers: int) -> KVShape:
        """Run one token and return the shape of keys and values. Checks that every layer uses the attention
        that this engine implements."""
        probe = attention.ShapeProbe()
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self._model(input_ids=token, position_ids=token, use_cache=False, instar_plan=probe)
        shapes = set(probe.shapes.values())
        if sorted(probe.shapes) != list(range(layers)) or len(shapes) != 1:
            raise EngineError("The local engine needs a model with the same full attention in every layer.")
        ((kv_heads, head_dim),) = shapes
        return KVShape(layers, kv_heads, head_dim, self.dtype, self.device)


def _prepare_shared_model(base: Any) -> Any:
    """Return a model that shares the weights of ``base`` and uses this engine's attention."""
    model = copy_with_shared_weights(base)
    model.set_attn_implementation(attention.NAME)
    return model.eval().requires_grad_(False)


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
    )
    return model.eval().requires_grad_(False)
