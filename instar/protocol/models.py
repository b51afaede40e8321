"""Models in training: local backends with separate adapters that share one copy of the base weights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace
from torch import nn
from transformers import PreTrainedModel

from instar.backends.base import ForwardBackwardResult, OptimStepResult
from instar.backends.local import state
from instar.backends.local.backend import RNG_LOCK, LocalBackend
from instar.backends.threaded import in_thread
from instar.config import AdamConfig, LocalBackendConfig, LoraConfig, LossConfig, ModelConfig
from instar.protocol.base import TRAINED_PARTS, AdapterSpec, CheckpointInfo, ProtocolError, convert_errors
from instar.protocol.checkpoints import ADAPTER_FOLDER, STATE_FOLDER, CheckpointStore
from instar.types import Floats, Sample

LORA_ALPHA = 32.0
"""The LoRA alpha of every adapter. The hosted services use this value for all ranks."""


class ServedLocalBackend(LocalBackend):
    """A local backend whose optimizer step treats missing gradients as zero. The hosted services do the same,
    so a batch without a training signal is not an error."""

    def _optim_step(self, adam: AdamConfig) -> OptimStepResult:
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super()._optim_step(adam)

    @in_thread
    def save_weights(self, path: Path) -> None:
        """Save a training state with the current weights and a fresh optimizer."""
        fresh_optimizer = torch.optim.AdamW(list(self._parameters.values()))
        with RNG_LOCK:
            state.save_training_state(path, self._parameters, fresh_optimizer, {"optim_steps": 0})


@dataclass(eq=False, slots=True)
class ClientSession:
    session_id: str
    owner: str
    last_seen: float
    """The `time.monotonic` time of the last request for the session or its models."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    model_id: str
    session_id: str
    owner: str
    base_model: str
    """The name of the base model that clients see."""


class CoreSharing:
    """Divides ``count`` cores, by default torch's number of threads, between training and sampling.

    Two computations on the same cores take far more than twice as long, because their threads wait for each
    other in every operation. So while both run, training and sampling each get half of the cores. A single
    client that alternates between them always gets all cores. Its results then do not depend on timing,
    although the number of threads can change the last bits of a sum. ``set_sampler_cores`` is called when the
    number of cores for sampling changes.
    """

    def __init__(self, set_sampler_cores: Callable[[int], None], count: int | None = None) -> None:
        self._core_count = count or torch.get_num_threads()
        self._set_sampler_cores = set_sampler_cores
        self._training_count = self._sampling_count = 0

    @contextmanager
    def reserve_for_training(self, set_cores: Callable[[int], None]) -> Generator[None]:
        """Reserve cores for training while the block runs, and call ``set_cores`` with their number."""
        set_cores(self._compute_cores(other_side_count=self._sampling_count))
        self._change_training_count(+1)
        try:
            yield
        finally:
            self._change_training_count(-1)

    @contextmanager
    def reserve_for_sampling(self) -> Generator[None]:
        """Reserve cores for sampling while the block runs. A running training pass keeps its cores."""
        self._sampling_count += 1
        try:
            yield
        finally:
            self._sampling_count -= 1

    def _change_training_count(self, change: int) -> None:
        previous_count, self._training_count = self._training_count, self._training_count + change
        if not (previous_count and self._training_count):
            self._set_sampler_cores(self._compute_cores(other_side_count=self._training_count))

    def _compute_cores(self, other_side_count: int) -> int:
        return max(1, self._core_count // 2) if other_side_count else self._core_count


class TrainingModel:
    """An adapter that is being trained. Calls take effect in the order in which they are made."""

    def __init__(
        self,
        backend: ServedLocalBackend,
        checkpoints: CheckpointStore,
        *,
        identity: ModelIdentity,
        adapter: AdapterSpec,
        max_context: int,
        core_sharing: CoreSharing,
    ) -> None:
        self.model_id = identity.model_id
        self.session_id = identity.session_id
        self.owner = identity.owner
        self.adapter = adapter
        self._backend = backend
        self._checkpoints = checkpoints
        self._base_model = identity.base_model
        self._max_context = max_context
        self._core_sharing = core_sharing
        self._is_closed = False

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the logprob of every token in each sample (NaN at index 0)."""
        with self._prepare_computation(samples):
            return await self._backend.forward(samples)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        with self._prepare_computation(samples):
            return await self._backend.forward_backward(samples, loss)

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        with self._prepare_computation():
            return await self._backend.optim_step(adam)

    async def save(self, name: str, *, optimizer: bool, ttl: float | None = None) -> CheckpointInfo:
        """Save a checkpoint to resume training from, with the optimizer state if ``optimizer`` is True. It
        replaces an existing checkpoint with the same name and expires after ``ttl`` seconds (None: never)."""

        async def fill(folder: Path) -> None:
            save = self._backend.save_state if optimizer else self._backend.save_weights
            # Both calls are made before either is awaited, so that no step can run between them.
            await asyncio.gather(save(folder / STATE_FOLDER), self._backend.publish(folder / ADAPTER_FOLDER))

        return await self._write_checkpoint("state", name, fill, ttl, has_optimizer=optimizer)

    async def export(self, name: str, *, ttl: float | None = None) -> CheckpointInfo:
        """Save the current weights as a checkpoint to sample from. See `save` for the arguments."""
        return await self._write_checkpoint(
            "sampler", name, lambda folder: self._backend.publish(folder / ADAPTER_FOLDER), ttl
        )

    async def load(self, path: str, *, optimizer: bool) -> None:
        self._check_not_closed()
        info = self._checkpoints.find_state(path, self.owner, optimizer=optimizer)
        folder = self._checkpoints.get_folder(info) / STATE_FOLDER
        try:
            with convert_errors():
                await self._backend.load_state(folder, optimizer=optimizer)
        except ProtocolError as error:
            # Clients must not see paths on the server's disk.
            text = str(error).replace(str(folder), info.path)
            raise ProtocolError(text, error.status, error.category) from error

    async def close(self) -> None:
        """Close the model once all earlier calls have finished. Later calls raise ProtocolError 404."""
        self._is_closed = True
        await self._backend.close()

    @contextmanager
    def _prepare_computation(self, samples: Sequence[Sample] = ()) -> Generator[None]:
        self._check_not_closed()
        for sample in samples:
            if len(sample) > self._max_context:
                raise ProtocolError(
                    f"{sample.sample_key} has {len(sample)} tokens; at most {self._max_context} are allowed"
                )
        with convert_errors(), self._core_sharing.reserve_for_training(self._backend.use_cores):
            yield

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise ProtocolError(f"model {self.model_id} was closed; create a new one", 404)

    async def _write_checkpoint(
        self,
        kind: Literal["state", "sampler"],
        name: str,
        fill: Callable[[Path], Awaitable[object]],
        ttl: float | None,
        *,
        has_optimizer: bool = False,
    ) -> CheckpointInfo:
        self._check_not_closed()
        info = CheckpointInfo(
            path="",
            kind=kind,
            model_id=self.model_id,
            base_model=self._base_model,
            rank=self.adapter.rank,
            created_at=0.0,
            size_bytes=0,
            has_optimizer=has_optimizer,
            extra={part: getattr(self.adapter, part) for part in TRAINED_PARTS},
        )
        with convert_errors():
            return await self._checkpoints.write(self.owner, name, info, fill, ttl=ttl)


def create_backend(
    base: PreTrainedModel, model: ModelConfig, adapter: AdapterSpec, threads: int | None
) -> tuple[ServedLocalBackend, AdapterSpec]:
    """Return a backend that shares the weights of ``base``, and ``adapter`` with the seed that it uses."""
    seed = secrets.randbits(31) if adapter.seed is None else adapter.seed
    lora = LoraConfig(rank=adapter.rank, alpha=LORA_ALPHA, targets=select_lora_targets(base, adapter))
    config = LocalBackendConfig(lora=lora, threads=threads)
    return ServedLocalBackend(model, config, seed=seed, base_model=base), replace(adapter, seed=seed)


def select_lora_targets(base: PreTrainedModel, adapter: AdapterSpec) -> list[str] | Literal["all-linear"]:
    """Return the name suffixes of the linear layers to train, or "all-linear" for all except the output
    layer. Raises ProtocolError if no layer is selected."""
    if adapter.train_attn and adapter.train_mlp and not adapter.train_unembed:
        return "all-linear"
    head = base.get_output_embeddings()
    suffixes: set[str] = set()
    for name, module in base.named_modules():
        is_attention = "attn" in name or "attention" in name
        is_trained = adapter.train_attn if is_attention else adapter.train_mlp
        if isinstance(module, nn.Linear) and (adapter.train_unembed if module is head else is_trained):
            suffixes.add(".".join(name.split(".")[-2:]))
    if not suffixes:
        raise ProtocolError("train_attn, train_mlp and train_unembed select no layers; enable at least one")
    return sorted(suffixes)
