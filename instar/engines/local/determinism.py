"""The conditions for replies that do not depend on the other requests in a batch (`engine.deterministic`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from instar.config import LocalEngineConfig, ModelConfig
from instar.errors import ConfigError
from instar.models import device_and_dtype, resolve_model

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The settings of transformers models with experts."""


def find_obstacle(device: str, dtype: str, folder: Path) -> str | None:
    """Return why the replies of the model in ``folder`` depend on the batch, and how to change it. Return
    None if the engine can avoid it."""
    if device != "cpu":
        return "the model runs on a GPU; set model.device to cpu"
    if dtype == "fp32":
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        if any(getattr(config.get_text_config(), name, None) for name in EXPERT_COUNTS):
            return "the model has experts and is computed in fp32; set model.dtype to bf16"
    return None


def is_supported(model: ModelConfig) -> bool:
    return find_obstacle(*device_and_dtype(model), resolve_model(model.name)) is None


def choose_threads(model: ModelConfig, config: LocalEngineConfig, kv_heads: int) -> int | None:
    """Return the number of threads with which replies are deterministic, or None if every number is possible.
    Raises ConfigError if the model or `engine.threads` does not allow it."""
    device, dtype = device_and_dtype(model)
    if obstacle := find_obstacle(device, dtype, resolve_model(model.name)):
        raise ConfigError(
            f"engine.deterministic: true is not possible, because {obstacle}, "
            "or engine.deterministic to false."
        )
    # On several threads, an fp32 product is divided among them depending on its number of rows. Attention is
    # always computed in fp32, but with several KV heads it has one product per head, each on one thread.
    if dtype != "fp32" and kv_heads > 1:
        return config.threads
    if config.threads is not None and config.threads > 1:
        raise ConfigError(
            f"engine.threads: {config.threads} is not possible with engine.deterministic, which needs one "
            "thread in fp32 or if the model has one KV head; set engine.threads to 1, or "
            "engine.deterministic to false."
        )
    return 1
