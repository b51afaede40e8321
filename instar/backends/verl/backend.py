"""Trains sharded over processes or GPUs, through verl's own workers on Ray.

All work runs in one thread, in the order it was asked for, and waits there for the workers; the event loop
stays free and calls may be pipelined.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from instar.backends.base import (
    Backend,
    BackendCapabilities,
    ForwardBackwardResult,
    OptimStepResult,
    is_mergeable,
)
from instar.backends.check import check_samples
from instar.backends.folders import write_folder
from instar.backends.loss_values import compute_loss
from instar.backends.verl.settings import WorkerSettings
from instar.backends.verl.sharding import RankShares, SerializedWeight, distribute_samples, gather
from instar.backends.verl.workers import RayWorkers
from instar.config import AdamConfig, LossConfig, ModelConfig, VerlBackendConfig
from instar.errors import BackendError, BackendLost, ConfigError, NonFiniteError
from instar.models import device_and_dtype, resolve_model
from instar.types import Artifact, Floats, Sample

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

SUPPORTED = ">=0.9.1,<0.10"
"""Versions of verl whose worker this was built on."""
INSTALL = "python3 -m venv verl-env && verl-env/bin/pip install 'instar[local,verl]'"
LOSSES = frozenset({"importance_sampling", "ppo", "cispo", "cross_entropy", "dro"})
META = "instar.json"
CHUNK_BYTES = 32 * 2**20
"""Bytes of weights that rank 0 hands out at once; they pass through Ray's object store."""


class VerlBackend(Backend):
    def __init__(self, model: ModelConfig, config: VerlBackendConfig, *, seed: int = 0) -> None:
        check_version()
        self._config = config
        self._seed = seed
        self._closed = False
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
        self._vocab_size, self._max_tokens = _limits(self._folder)
        self._workers = RayWorkers(self._settings)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="instar-verl")

    @property
    def capabilities(self) -> BackendCapabilities:
        lora = self._config.lora
        return BackendCapabilities(
            losses=LOSSES,
            artifacts=frozenset({"weights" if lora is None else "adapter"}),
            full_finetuning=True,
            reference=lora is not None,
            live=is_mergeable(lora),
        )

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        begin, more = True, True
        while more:
            weights, more = await self._run(partial(self._next_weights, begin))
            begin = False
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

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        return await self._run(lambda: self._forward_backward(samples, loss))

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        return await self._run(lambda: self._optim_step(adam))

    async def publish(self, path: Path) -> Artifact:
        return await self._run(lambda: self._publish(path))

    async def save_state(self, path: Path) -> None:
        await self._run(lambda: self._save_state(path))

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        await self._run(lambda: self._load_state(path, optimizer))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._pool, self._workers.close)
        self._pool.shutdown(wait=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise BackendError("the backend is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # --- in the thread -------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._workers.alive:
            self._workers.begin()
        self._workers.call("begin", self._seed)
        self._has_gradient = False

    def _forward(self, samples: Sequence[Sample], *, base: bool) -> list[Floats]:
        check_samples(samples, self._vocab_size, self._max_tokens)
        if not samples:
            return []
        shares = self._distribute(samples)
        found = self._workers.call("logprobs", shares.max_tokens, base, shares=shares.rows)
        return gather(shares, found, samples)

    def _forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        check_samples(samples, self._vocab_size, self._max_tokens, loss)
        results = [np.full(len(sample), np.nan, np.float32) for sample in samples]
        # A sample without trained tokens has no part in the loss, so it is not computed.
        trained = [i for i, sample in enumerate(samples) if (sample.mask > 0).any()]
        chosen = [samples[i] for i in trained]
        micro_batches = 0
        if chosen:
            shares = self._distribute(chosen)
            parts = self._workers.call("train", shares.max_tokens, loss, shares=shares.rows)
            new = gather(shares, [part.logprobs for part in parts], chosen)
            if not parts[0].finite:
                raise NonFiniteError(_not_finite(loss, chosen, new))
            self._has_gradient = True
            for i, logprobs in zip(trained, new, strict=True):
                results[i] = np.where(samples[i].mask > 0, logprobs, np.float32(np.nan))
            micro_batches = parts[0].micro_batches
        value, metrics = compute_loss(loss, samples, results)
        return ForwardBackwardResult(value, results, metrics | {"micro_batches": float(micro_batches)})

    def _distribute(self, samples: Sequence[Sample]) -> RankShares:
        return distribute_samples(samples, self._config.ranks, self._config.micro_batch_tokens)

    def _next_weights(self, begin: bool) -> tuple[list[SerializedWeight], bool]:
        return self._workers.call("next_weights", begin, CHUNK_BYTES)[0]

    def _optim_step(self, adam: AdamConfig) -> OptimStepResult:
        if not self._workers.alive:
            raise BackendLost("verl's workers are gone")
        if not self._has_gradient:
            raise BackendError("optim_step without a gradient: nothing was trained on since the last step")
        self._has_gradient = False
        grad_norm = float(self._workers.call("step", adam)[0])
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient norm is {grad_norm}; the step was not applied")
        clipped = 0.0 < adam.grad_clip_norm < grad_norm
        return OptimStepResult(grad_norm, {"lr": adam.lr, "grad_clipped": float(clipped)})

    def _publish(self, path: Path) -> Artifact:
        write_folder(path, lambda folder: self._ask("publish", str(folder.resolve())))
        return Artifact("weights" if self._config.lora is None else "adapter", str(path.resolve()))

    def _save_state(self, path: Path) -> None:
        def fill(folder: Path) -> None:
            self._ask("save", str(folder.resolve()))
            (folder / META).write_text(json.dumps(self._state_shape(), indent=1) + "\n")

        write_folder(path, fill)

    def _load_state(self, path: Path, optimizer: bool) -> None:
        self._check_state(path)
        if not self._workers.alive:
            self._start()
        self._ask("load", str(path.resolve()), optimizer)
        self._has_gradient = False

    def _ask(self, method: str, *arguments: Any) -> None:
        self._workers.call(method, *arguments)

    def _state_shape(self) -> dict[str, Any]:
        """What a saved state has to shares with the backend that loads it."""
        lora = self._config.lora
        return {"format": 1, "ranks": self._config.ranks, "lora": lora and lora.model_dump()}

    def _check_state(self, path: Path) -> None:
        try:
            saved = cast(dict[str, Any], json.loads((path / META).read_text()))
        except FileNotFoundError as error:
            raise BackendError(f"{path} holds no training state of verl: {META} is missing") from error
        for name, here in self._state_shape().items():
            if saved.get(name) != here:
                raise BackendError(
                    f"{path} is the state of another run: its {name} is {saved.get(name)!r} and "
                    f"here it is {here!r}"
                )


def check_version() -> None:
    from packaging.specifiers import SpecifierSet

    try:
        found = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"backend.type: 'verl' needs the package verl{SUPPORTED} in the environment whose interpreter is "
            f"backend.python: {INSTALL}"
        ) from error
    if found not in SpecifierSet(SUPPORTED):
        raise ConfigError(
            f"backend.type: 'verl' supports verl{SUPPORTED}; {found} is installed. An environment with one: "
            f"{INSTALL}"
        )


def _limits(folder: Path) -> tuple[int, int | None]:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    return int(config.vocab_size), getattr(config, "max_position_embeddings", None)


def _not_finite(loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]) -> str:
    """Names the samples whose own loss is not finite in fp32."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = [
            float(np.float32(compute_loss(loss, [sample], [new])[0]))
            for sample, new in zip(samples, logprobs, strict=True)
        ]
    bad = [s.sample_key for s, value in zip(samples, values, strict=True) if not math.isfinite(value)]
    keys = ", ".join((bad or [sample.sample_key for sample in samples])[:4])
    return f"the {loss.name} loss is not finite on {len(samples)} samples ({keys}, ...)"
