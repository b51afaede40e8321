"""The local engine's transformers model."""

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
from instar.engines.local.adapters import Adapter, AdapterLayers
from instar.engines.local.kv_cache import KVShape
from instar.engines.local.lora import pack_weights, read_adapter, replace_linears
from instar.engines.stopping import collect_eos_ids
from instar.errors import EngineError
from instar.models import copy_with_shared_weights, device_and_dtype, get_max_positions, resolve_model
from instar.types import Policy, PolicyRef

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """The content of a policy's files. It can be applied between two steps."""

    ref: PolicyRef
    adapter: Adapter
    source: Path
    """The folder with the full weights that the adapter is applied to."""
    state: dict[str, Tensor] | None
    """The full weights in ``source``, or None if the model already has these weights."""


class EngineModel:
    """The model that an engine serves. It shares the weights of ``base``, or loads them if that is None."""

    def __init__(self, config: ModelConfig, base: Any = None) -> None:
        transformers_logging.disable_progress_bar()
        self.device, dtype = device_and_dtype(config)
        self.dtype = DTYPES[dtype]
        self.folder = resolve_model(config.name)
        self.starts_from_adapter = config.adapter is not None
        self._source = self.folder
        if base is None:
            self._model = _load_model(self.folder, self.dtype)
        else:
            self._model = copy_with_shared_weights(base).eval().requires_grad_(False)
            self._model.set_attn_implementation(attention.NAME)
        self._model.to(self.device)
        replace_linears(self._model)
        pack_weights(self._model)
        self.adapters = self._create_adapter_layers()
        self.vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        text_config = self._model.config.get_text_config()
        max_positions = get_max_positions(text_config) or config.context_length
        self.max_context = min(config.context_length, max_positions)
        self.kv_shape = self._probe_kv_shape(text_config.num_hidden_layers)

    def share(self) -> EngineModel:
        """Return a model that shares the weights but not the adapter. Neither may load full weights later."""
        shared = copy.copy(self)
        shared._model = copy_with_shared_weights(self._model)
        shared.adapters = shared._create_adapter_layers()
        return shared

    @property
    def serves_full_weights(self) -> bool:
        """True if the weights are those of a policy, instead of the base model's."""
        return self._source != self.folder

    def _create_adapter_layers(self) -> AdapterLayers:
        return AdapterLayers(self._model, self._model.get_output_embeddings())

    def get_eos_ids(self, tokenizer: Any) -> set[int]:
        sources = (self._model.generation_config, self._model.config, tokenizer)
        return collect_eos_ids(*(getattr(source, "eos_token_id", None) for source in sources))

    def forward(
        self, ids: Tensor, positions: Tensor, logit_indices: Tensor, plan: attention.StepPlan
    ) -> Tensor:
        """Return the logits [len(logit_indices), vocabulary] at the tokens with these indices."""
        return self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_indices,
            instar_plan=plan,
        ).logits[0]

    def read(self, policy: Policy) -> PolicyUpdate:
        """Read a policy without changing the model. ``forward`` may run at the same time."""
        kind, path = policy.artifact.kind, Path(policy.artifact.path)
        source = path.resolve() if kind == "weights" else self.folder
        pairs = read_adapter(path, self._model, self.dtype, self.device) if kind == "adapter" else {}
        # Always reread full weights, because the files in the folder may have changed.
        state = self._read_state(source) if kind == "weights" or source != self._source else None
        return PolicyUpdate(policy.ref, Adapter(pairs), source, state)

    def replace_weights(self, update: PolicyUpdate) -> None:
        assert update.state is not None
        self._model.load_state_dict(update.state)
        self._source = update.source
        pack_weights(self._model)

    def _read_state(self, folder: Path) -> dict[str, Tensor]:
        try:
            state: dict[str, Tensor] = _load_model(folder, self.dtype).state_dict()
        except (OSError, ValueError) as error:
            raise EngineError(f"The weights in {folder} cannot be read: {error}") from error
        current: dict[str, Tensor] = self._model.state_dict()
        differences = {(n, t.shape) for n, t in state.items()} ^ {(n, t.shape) for n, t in current.items()}
        if differences:
            name = min(name for name, _ in differences)
            got, expected = (tuple(w[name].shape) if name in w else "no weight" for w in (state, current))
            raise EngineError(
                f"The weights in {folder} do not have the architecture of {self.folder}: expected {expected} "
                f"for {name}, got {got}."
            )
        return state

    def _probe_kv_shape(self, layer_count: int) -> KVShape:
        """Return the shape of keys and values. Raises EngineError if a layer's attention is not supported."""
        probe = attention.ShapeProbe()
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self._model(input_ids=token, position_ids=token, use_cache=False, instar_plan=probe)
        shapes = set(probe.shapes.values())
        if sorted(probe.shapes) != list(range(layer_count)) or len(shapes) != 1:
            raise EngineError(
                "The local engine needs supported attention with the same shape in all layers, but "
                f"{len(probe.shapes)} of {layer_count} layers have it, with {len(shapes)} shapes"
            )
        ((kv_heads, head_dim),) = shapes
        return KVShape(layer_count, kv_heads, head_dim, self.dtype, self.device)


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
    )
    return model.eval().requires_grad_(False)
