"""Trains a model that is sharded over processes or GPUs, with verl's workers on Ray."""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from instar.backends.base import (
    NO_GRADIENT,
    BackendCapabilities,
    ForwardBackwardResult,
    OptimStepResult,
    make_torch_capabilities,
)
from instar.backends.check import check_samples, make_nan_logprobs, select_trained
from instar.backends.cloud import read_state
from instar.backends.folders import write_folder
from instar.backends.loss_values import compute_loss, make_non_finite_error
from instar.backends.packages import check_installed
from instar.backends.threaded import ThreadedBackend, in_thread
from instar.backends.verl.sharding import (
    DistributedBatch,
    SerializedWeight,
    WorkerSettings,
    distribute_samples,
    gather_logprobs,
)
from instar.backends.verl.workers import NO_WORKERS, RayWorkers
from instar.config import AdamConfig, LossConfig, ModelConfig, VerlBackendConfig
from instar.errors import BackendError, BackendLost, NonFiniteError
from instar.models import device_and_dtype, resolve_model
from instar.types import Artifact, Floats, Sample

if TYPE_CHECKING:
    from torch import Tensor

STATE_FILE = "instar.json"
CHUNK_BYTES = 32 * 2**20
"""The approximate number of bytes that rank 0 exports in one call, through Ray's object store."""


class VerlBackend(ThreadedBackend):
    def __init__(self, model: ModelConfig, config: VerlBackendConfig, *, seed: int = 0) -> None:
        check_installed(config.model_copy(update={"python": None}))
        from transformers import AutoConfig

        super().__init__("instar-verl")
        self._config = config
        self._seed = seed
        self._has_gradient = False
        folder = resolve_model(model.name)
        device, dtype = device_and_dtype(model)
        settings = WorkerSettings(
            folder=str(folder),
            device=device,
            dtype=dtype,
            lora=config.lora,
            ranks=config.ranks,
            call_timeout=config.deadline,
            threads=max(1, (os.cpu_count() or 1) // config.ranks) if device == "cpu" else None,
        )
        self._workers = RayWorkers(settings)
        model_config: Any = AutoConfig.from_pretrained(folder)
        self._vocab_size = int(model_config.vocab_size)
        self._max_tokens: int | None = getattr(model_config, "max_position_embeddings", None)

    @property
    def capabilities(self) -> BackendCapabilities:
        return make_torch_capabilities(self._config.lora, has_reference=self._config.lora is not None)

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        is_first, has_more = True, True
        while has_more:
            weights, has_more = await self._next_weights(is_first)
            is_first = False
            for weight in weights:
                yield weight.name, weight.to_tensor()

    @in_thread
    def _next_weights(self, is_first: bool) -> tuple[list[SerializedWeight], bool]:
        return self._workers.call("next_weights", is_first, CHUNK_BYTES)[0]

    @in_thread
    def start(self) -> None:
        self._start()

    @in_thread
    def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return self._forward(samples, use_base_model=False)

    @in_thread
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        if self._config.lora is None:
            raise BackendError(
                "the base model's logprobs are not available, because verl keeps no copy of the base weights "
                "during full fine-tuning; set backend.lora"
            )
        return self._forward(samples, use_base_model=True)

    @in_thread
    def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        check_samples(samples, self._vocab_size, self._max_tokens, loss)
        self._pause()
        results = make_nan_logprobs(samples)
        indices = select_trained(samples)
        trained = [samples[i] for i in indices]
        micro_batches = 0
        if trained:
            batch = self._distribute(trained)
            rank_results = self._workers.call("train", batch.max_tokens, loss, per_rank=batch.samples)
            new_logprobs = gather_logprobs(batch, [result.logprobs for result in rank_results], trained)
            if not rank_results[0].is_finite:
                raise make_non_finite_error(loss, trained, new_logprobs, np.float32)
            self._has_gradient = True
            for i, logprobs in zip(indices, new_logprobs, strict=True):
                results[i] = np.where(samples[i].mask > 0, logprobs, np.float32(np.nan))
            micro_batches = rank_results[0].micro_batch_count
        value, metrics = compute_loss(loss, samples, results)
        return ForwardBackwardResult(value, results, metrics | {"micro_batches": float(micro_batches)})

    @in_thread
    def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        if not self._workers.is_alive:
            raise BackendLost(NO_WORKERS)
        if not self._has_gradient:
            raise BackendError(NO_GRADIENT)
        self._has_gradient = False
        grad_norm = float(self._workers.call("step", adam)[0])
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient norm is {grad_norm}; the step was not applied")
        self._require_finite_weights()
        return OptimStepResult.from_norm(adam, grad_norm)

    def _require_finite_weights(self) -> None:
        if not self._workers.call("has_finite_weights")[0]:
            raise NonFiniteError(
                "the weights are not finite; load an earlier state and lower the learning rate"
            )

    @in_thread
    def publish(self, path: Path) -> Artifact:
        # Check on all ranks first: if only the writing rank raised an error, the others would wait for it.
        self._require_finite_weights()
        write_folder(path, lambda folder: self._workers.call("publish", str(folder.resolve())))
        return Artifact("weights" if self._config.lora is None else "adapter", str(path.resolve()))

    @in_thread
    def save_state(self, path: Path) -> None:
        self._require_finite_weights()

        def fill(folder: Path) -> None:
            self._workers.call("save", str(folder.resolve()))
            (folder / STATE_FILE).write_text(json.dumps(self._get_state_settings(), indent=1) + "\n")

        write_folder(path, fill)

    @in_thread
    def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        read_state(path, "format", self._get_state_settings(), STATE_FILE)  # checks the settings
        if not self._workers.is_alive:
            self._start()
        self._workers.call("load", str(path.resolve()), optimizer)
        self._has_gradient = False

    # --- called in the backend's thread ---

    def _release(self) -> None:
        self._workers.close()

    def _start(self) -> None:
        if not self._workers.is_alive:
            self._workers.start()
        self._workers.call("start", self._seed)
        self._has_gradient = False

    def _forward(self, samples: Sequence[Sample], *, use_base_model: bool) -> list[Floats]:
        check_samples(samples, self._vocab_size, self._max_tokens)
        self._pause()
        if not samples:
            return []
        batch = self._distribute(samples)
        logprobs = self._workers.call("logprobs", batch.max_tokens, use_base_model, per_rank=batch.samples)
        return gather_logprobs(batch, logprobs, samples)

    def _distribute(self, samples: Sequence[Sample]) -> DistributedBatch:
        return distribute_samples(samples, self._config.ranks, self._config.micro_batch_tokens)

    def _get_state_settings(self) -> dict[str, Any]:
        """Return the settings that must match between a saved state and the backend that loads it."""
        lora = self._config.lora
        return {"format": 1, "ranks": self._config.ranks, "lora": lora and lora.model_dump()}
