"""Choose the context of a run's model if `model.max_context` is not set.

The context is the model's own maximum, limited so that the keys and values of one session of full length need
at most an eighth of the memory that the weights leave free, and by a maximum for the device, because training
on a session needs much more memory and time than sampling it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.cluster.layout import RunFolder
from instar.config import (
    CloudEngineConfig,
    EngineReferenceConfig,
    LocalClusterConfig,
    LocalEngineConfig,
    MixedEngineConfig,
    ModelConfig,
    RunConfig,
    UpstreamEngineConfig,
    VllmEngineConfig,
)
from instar.config.model import DEFAULT_CONTEXT
from instar.cpu import read_free_memory
from instar.models import resolve_tokenizer
from instar.types import Json

MAX_CPU_CONTEXT = 8192
MAX_GPU_CONTEXT = 32_768
MEMORY_FRACTION = 1 / 8
"""The fraction of the free memory that one session of full length may need."""
WEIGHT_COPIES = 3
"""The memory of the engine's and the trainer's weights and of the optimizer, as a multiple of the files."""
ROUNDING = 1024
SMI_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ContextLimit:
    tokens: int
    reason: str


def resolve_context(config: RunConfig, folder: RunFolder, log: Callable[[str], None]) -> RunConfig:
    """Return the config with `model.max_context` set, also for a teacher. An existing run keeps its context.
    A provider's model has none."""
    if isinstance(config.engine, UpstreamEngineConfig):
        return config
    if config.model.max_context is None:
        previous = folder.read_config().model if folder.config_file.is_file() else None
        if previous is not None and previous.name == config.model.name and previous.max_context:
            tokens = previous.max_context
        else:
            limit = choose_context(config)
            tokens = limit.tokens
            log(f"context: {tokens:,} tokens ({limit.reason}); set model.max_context to change it")
        config = config.model_copy(update={"model": _set_context(config.model, tokens)})
    reference = config.trainer.reference
    if isinstance(reference, EngineReferenceConfig) and reference.model.max_context is None:
        teacher = _set_context(reference.model, config.model.context_length)
        trainer = {"reference": reference.model_copy(update={"model": teacher})}
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})
    return config


def _set_context(model: ModelConfig, tokens: int) -> ModelConfig:
    return model.model_copy(update={"max_context": tokens})


def choose_context(config: RunConfig, free_memory: int | None = None) -> ContextLimit:
    """Return the context and the reason for it. ``free_memory`` is in bytes; by default, it is measured."""
    folder = resolve_tokenizer(config.model.name)
    file = folder / "config.json"
    settings: Json = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    settings = settings.get("text_config") or settings
    model_limit = settings.get("max_position_embeddings")
    if not model_limit:
        return ContextLimit(DEFAULT_CONTEXT, "the model's config has no max_position_embeddings")
    limits = [ContextLimit(model_limit, "the model's maximum")]
    limits += _list_limits(config, settings, folder, free_memory)
    lowest = min(limits, key=lambda limit: limit.tokens)
    if lowest.tokens < min(DEFAULT_CONTEXT, model_limit):
        return ContextLimit(min(DEFAULT_CONTEXT, model_limit), "the least that is chosen")
    return lowest


def _list_limits(
    config: RunConfig, settings: Json, folder: Path, free_memory: int | None
) -> list[ContextLimit]:
    engine: Any = config.engine
    if isinstance(engine, MixedEngineConfig):
        engine = engine.parts[0]
    if isinstance(engine, CloudEngineConfig):
        return [ContextLimit(MAX_GPU_CONTEXT, "the maximum for a training service")]
    if isinstance(engine, VllmEngineConfig) and engine.servers:
        return [ContextLimit(DEFAULT_CONTEXT, "the maximum for servers that are already running")]
    if not isinstance(config.cluster, LocalClusterConfig):
        return [ContextLimit(MAX_CPU_CONTEXT, "the maximum for machines whose memory is not known")]
    gpu_memory = None if config.model.device == "cpu" else _read_free_gpu_memory()
    is_gpu = gpu_memory is not None
    limits = [
        ContextLimit(MAX_GPU_CONTEXT, "the maximum on a GPU")
        if is_gpu
        else ContextLimit(MAX_CPU_CONTEXT, "the maximum on a CPU")
    ]
    if isinstance(engine, LocalEngineConfig) and engine.kv_tokens is not None:
        limits.append(ContextLimit(engine.kv_tokens, "engine.kv_tokens"))
    if token_bytes := _compute_token_bytes(settings, 4 if config.model.dtype == "fp32" or not is_gpu else 2):
        free = free_memory if free_memory is not None else gpu_memory or read_free_memory()
        files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
        weights = sum(file.stat().st_size for file in files)
        tokens = int(MEMORY_FRACTION * (free - WEIGHT_COPIES * weights) / token_bytes)
        limits.append(ContextLimit(tokens // ROUNDING * ROUNDING, "limited by the free memory"))
        if isinstance(engine, VllmEngineConfig) and not is_gpu:
            tokens = int(engine.kv_gib * 2**30 / token_bytes)
            limits.append(ContextLimit(tokens // ROUNDING * ROUNDING, "limited by engine.kv_gib"))
    return limits


def _compute_token_bytes(settings: Json, value_bytes: int) -> int | None:
    """Return the size of one token's keys and values, or None if the model's config does not have the usual
    settings."""
    layers, heads = settings.get("num_hidden_layers"), settings.get("num_attention_heads")
    hidden_size = settings.get("hidden_size")
    if not layers or not heads or not hidden_size:
        return None
    head_dim = settings.get("head_dim") or hidden_size // heads
    return 2 * layers * (settings.get("num_key_value_heads") or heads) * head_dim * value_bytes


def _read_free_gpu_memory() -> int | None:
    """Return the free memory of the fullest GPU, or None if there is no GPU. This does not import torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_TIMEOUT_SECONDS, check=True
        )
        return min(int(line) for line in completed.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # no driver or no GPU
