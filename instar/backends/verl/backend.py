"""Trains sharded over processes or GPUs with verl's own workers on Ray."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from instar.backends.base import (
    NO_GRADIENT,
    BackendCapabilities,
    ForwardBackwardResult,
    OptimStepResult,
    is_mergeable,
    torch_capabilities,
)
from instar.backends.check import check_samples, nan_logprobs, select_trained
from instar.backends.folders import write_folder
from instar.backends.loss_values import compute_loss
from instar.backends.threaded import ThreadedBackend
from instar.backends.verl.settings import WorkerSettings
from instar.backends.verl.sharding import RankShares, SerializedWeight, distribute_samples, gather_logprobs
from instar.backends.verl.workers import NO_WORKERS, RayWorkers
from instar.config import AdamConfig, LossConfig, ModelConfig, VerlBackendConfig
from instar.errors import BackendError, BackendLost, ConfigError, NonFiniteError
from instar.models import device_and_dtype, resolve_model
from instar.types import Artifact, Floats, Sample

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED = ">=0.9.1,<0.10"
"""The versions of verl whose worker this backend extends."""
INSTALL = "python3 -m venv verl-env && verl-env/bin/pip install 'instar[local,verl]'"
STATE_FILE = "instar.json"
CHUNK_BYTES = 32 * 2**20
"""Bytes of weights that rank 0 exports at once, through Ray's object store."""


class VerlBackend(ThreadedBackend):
    def __init__(self, model: ModelConfig, config: VerlBackendConfig, *, seed: int = 0) -> None:
        check_version()
        super().__init__("instar-verl")
        self._config = config
        self._seed = seed
        self._has_gradient = False
        self._folder = resolve_model(model.name)
        device, dtype = device_and_dtype(model)
        self._settings = WorkerSettings(
            folder=str(self._folder),
            device=device,
            dtype=dtype,
            lora=config.lora,
            ranks=config.ranks,
            deadline=config.deadline,
            threads=max(1, (os.cpu_count() or 1) // config.ranks) if device == "cpu" else None,
        )
        self._vocab_size, self._max_tokens = _read_limits(self._folder)
        self._workers = RayWorkers(self._settings)

    @property
    def capabilities(self) -> BackendCapabilities:
        lora = self._config.lora
        return torch_capabilities(lora, reference=lora is not None, live=is_mergeable(lora))

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        is_first, has_more = True, True
        while has_more:
            weights, has_more = await self._run(partial(self._next_weights, is_first))
            is_first = False
            for weight in weights:
                yield weight.name, weight.tensor()

    async def start(self) -> None:
        await self._run(self._start)

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._run(lambda: self._forward(samples, base=False))

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        if self._config.lora is None:
            raise BackendError("verl keeps no copy of the base weights under full fine-tuning")
        return await self._run(lambda: self._forward(samples, base=True))

    # --- called in the thread ----------------------------------------------------------------------

    def _release(self) -> None:
        self._workers.close()

    def _start(self) -> None:
        if not self._workers.is_alive:
            self._workers.start()
        self._workers.call("start", self._seed)
        self._has_gradient = False

    def _forward(self, samples: Sequence[Sample], *, base: bool) -> list[Floats]:
        check_samples(samples, self._vocab_size, self._max_tokens)
        if not samples:
            return []
        shares = self._distribute(samples)
        logprobs = self._workers.call("logprobs", shares.max_tokens, base, shares=shares.samples)
        return gather_logprobs(shares, logprobs, samples)

    def _forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        check_samples(samples, self._vocab_size, self._max_tokens, loss)
        results = nan_logprobs(samples)
        trained = select_trained(samples)
        chosen = [samples[i] for i in trained]
        micro_batches = 0
        if chosen:
            shares = self._distribute(chosen)
            parts = self._workers.call("train", shares.max_tokens, loss, shares=shares.samples)
            new = gather_logprobs(shares, [part.logprobs for part in parts], chosen)
            if not parts[0].is_finite:
                raise NonFiniteError(_non_finite_message(loss, chosen, new))
            self._has_gradient = True
            for i, logprobs in zip(trained, new, strict=True):
                results[i] = np.where(samples[i].mask > 0, logprobs, np.float32(np.nan))
            micro_batches = parts[0].micro_batches
        value, metrics = compute_loss(loss, samples, results)
        return ForwardBackwardResult(value, results, metrics | {"micro_batches": float(micro_batches)})

    def _distribute(self, samples: Sequence[Sample]) -> RankShares:
        return distribute_samples(samples, self._config.ranks, self._config.micro_batch_tokens)

    def _next_weights(self, is_first: bool) -> tuple[list[SerializedWeight], bool]:
        return self._workers.call("next_weights", is_first, CHUNK_BYTES)[0]

    def _optim_step(self, adam: AdamConfig) -> OptimStepResult:
        if not self._workers.is_alive:
            raise BackendLost(NO_WORKERS)
        if not self._has_gradient:
            raise BackendError(NO_GRADIENT)
        self._has_gradient = False
        grad_norm = float(self._workers.call("step", adam)[0])
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient norm is {grad_norm}; the step was not applied")
        return OptimStepResult.from_norm(adam, grad_norm)

    def _publish(self, path: Path) -> Artifact:
        def fill(folder: Path) -> None:
            self._workers.call("publish", str(folder.resolve()))

        write_folder(path, fill)
        return Artifact("weights" if self._config.lora is None else "adapter", str(path.resolve()))

    def _save_state(self, path: Path) -> None:
        def fill(folder: Path) -> None:
            self._workers.call("save", str(folder.resolve()))
            (folder / STATE_FILE).write_text(json.dumps(self._state_shape(), indent=1) + "\n")

        write_folder(path, fill)

    def _load_state(self, path: Path, optimizer: bool) -> None:
        self._check_state(path)
        if not self._workers.is_alive:
            self._start()
        self._workers.call("load", str(path.resolve()), optimizer)
        self._has_gradient = False

    def _state_shape(self) -> dict[str, Any]:
        """Return the settings that must be equal in a saved state and in the backend that loads it."""
        lora = self._config.lora
        return {"format": 1, "ranks": self._config.ranks, "lora": lora and lora.model_dump()}

    def _check_state(self, path: Path) -> None:
        try:
            saved = cast(dict[str, Any], json.loads((path / STATE_FILE).read_text()))
        except FileNotFoundError as error:
            raise BackendError(
                f"{path} contains no training state of verl: {STATE_FILE} is missing"
            ) from error
        for name, expected in self._state_shape().items():
            if saved.get(name) != expected:
                raise BackendError(f"{path} was saved with {name} {saved.get(name)!r}, not {expected!r}")


def check_version() -> None:
    from packaging.specifiers import SpecifierSet

    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"backend.type: 'verl' needs the package verl{SUPPORTED} in the environment of backend.python: "
            f"{INSTALL}"
        ) from error
    if version not in SpecifierSet(SUPPORTED):
        raise ConfigError(
            f"backend.type: 'verl' supports verl{SUPPORTED}; {version} is installed. To install it: {INSTALL}"
        )


def _read_limits(folder: Path) -> tuple[int, int | None]:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    return int(config.vocab_size), getattr(config, "max_position_embeddings", None)


def _non_finite_message(loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]) -> str:
    """Return an error message that names the samples whose own loss is not finite in fp32."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = [
            float(np.float32(compute_loss(loss, [sample], [new])[0]))
            for sample, new in zip(samples, logprobs, strict=True)
        ]
    bad = [s.sample_key for s, value in zip(samples, values, strict=True) if not math.isfinite(value)]
    keys = ", ".join((bad or [sample.sample_key for sample in samples])[:4])
    return f"the {loss.name} loss is not finite on {len(samples)} samples ({keys}, ...)"
