"""Models in training. Each is a local backend with its own adapter, and all share one copy of the base
weights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from instar.backends.base import ForwardBackwardResult, OptimStepResult
from instar.backends.local import state
from instar.backends.local.backend import RNG_LOCK, LocalBackend
from instar.backends.local.model import load_base
from instar.config import AdamConfig, LocalBackendConfig, LoraConfig, LossConfig, ModelConfig
from instar.errors import BackendError
from instar.protocol.base import AdapterSpec, CheckpointInfo, ProtocolError, TrainingModel
from instar.protocol.checkpoints import ADAPTER, STATE, CheckpointStore
from instar.protocol.cores import CoreSharing
from instar.protocol.errors import convert_errors
from instar.types import Floats, Sample, new_id

ALPHA = 32.0
"""The alpha of every adapter, whatever its rank, as on the services."""


class ServedLocalBackend(LocalBackend):
    """A local backend that treats a step without a gradient as a step with a gradient of zero, as the
    services do: the moments decay and are applied. A batch without any signal is therefore not an error for
    the client."""

    def _optim_step(self, adam: AdamConfig) -> OptimStepResult:
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super()._optim_step(adam)

    async def save_weights(self, path: Path) -> None:
        """Save the state without the optimizer's moments."""
        await self._run(lambda: self._save_weights(path))

    def _save_weights(self, path: Path) -> None:
        fresh_optimizer = torch.optim.AdamW(list(self._parameters.values()))
        with RNG_LOCK:
            state.save_training(path, self._parameters, fresh_optimizer, {"optim_steps": 0})


@dataclass(eq=False, slots=True)
class ClientSession:
    session_id: str
    owner: str
    last_seen: float


class LocalTrainingModel(TrainingModel):
    def __init__(
        self,
        backend: ServedLocalBackend,
        checkpoints: CheckpointStore,
        *,
        session: ClientSession,
        base_model: str,
        adapter: AdapterSpec,
        max_context: int,
        cores: CoreSharing,
    ) -> None:
        self.model_id = new_id("model")
        self.session_id = session.session_id
        self.owner = session.owner
        self.adapter = adapter
        self._backend = backend
        self._checkpoints = checkpoints
        self._base_model = base_model
        self._max_context = max_context
        self._cores = cores
        self._ended = False

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        self._check(samples)
        with convert_errors(), self._computing():
            return await self._backend.forward(samples)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        self._check(samples)
        with convert_errors(), self._computing():
            return await self._backend.forward_backward(samples, loss)

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        self._check()
        with convert_errors(), self._computing():
            return await self._backend.optim_step(adam)

    async def save(self, name: str, *, optimizer: bool, ttl: float | None = None) -> CheckpointInfo:
        async def fill(folder: Path) -> None:
            save = self._backend.save_state if optimizer else self._backend.save_weights
            # Both calls are made before either is awaited, so that no step can run between them.
            await asyncio.gather(save(folder / STATE), self._backend.publish(folder / ADAPTER))

        self._check()
        info = replace(self._info("state"), has_optimizer=optimizer)
        with convert_errors():
            return await self._checkpoints.write(self.owner, name, info, fill, ttl=ttl)

    async def export(self, name: str, *, ttl: float | None = None) -> CheckpointInfo:
        async def fill(folder: Path) -> None:
            await self._backend.publish(folder / ADAPTER)

        self._check()
        with convert_errors():
            return await self._checkpoints.write(self.owner, name, self._info("sampler"), fill, ttl=ttl)

    async def load(self, path: str, *, optimizer: bool) -> None:
        self._check()
        info = self._checkpoints.find(path, self.owner)
        if info.kind != "state":
            raise ProtocolError(f"{path} cannot be loaded: it is a sampler and was not saved as a state")
        if optimizer and not info.has_optimizer:
            raise ProtocolError(f"{path} was saved without its optimizer; load only the weights")
        folder = self._checkpoints.folder(info) / STATE
        try:
            with convert_errors():
                await self._backend.load_state(folder, optimizer=optimizer)
        except ProtocolError as error:
            # Clients must not see the folder on the server's disk.
            text = str(error).replace(str(folder), info.path)
            raise ProtocolError(text, error.status, error.category) from error

    async def end(self) -> None:
        """End the model after all calls that were already made."""
        self._ended = True
        await self._backend.close()

    def _computing(self) -> AbstractContextManager[None]:
        return self._cores.reserve_for_training(self._backend.use_cores)

    def _check(self, samples: Sequence[Sample] = ()) -> None:
        if self._ended:
            raise ProtocolError(f"the model {self.model_id} was ended", 404)
        for sample in samples:
            if len(sample) > self._max_context:
                raise ProtocolError(
                    f"{sample.sample_key} has {len(sample)} tokens; at most {self._max_context} are allowed"
                )

    def _info(self, kind: Literal["state", "sampler"]) -> CheckpointInfo:
        return CheckpointInfo(
            path="",
            kind=kind,
            model_id=self.model_id,
            base_model=self._base_model,
            rank=self.adapter.rank,
            created_at=0.0,
            size_bytes=0,
            extra={
                "train_attn": self.adapter.train_attn,
                "train_mlp": self.adapter.train_mlp,
                "train_unembed": self.adapter.train_unembed,
            },
        )


class TrainingModelFactory:
    """Loads the base model and creates backends that share it. Both block, so use it in a thread."""

    def __init__(self, model: ModelConfig, threads: int | None) -> None:
        self._model = model
        self._threads = threads
        self.base: PreTrainedModel = load_base(model)

    def create_backend(self, adapter: AdapterSpec) -> tuple[ServedLocalBackend, AdapterSpec]:
        """Return a new backend, and the adapter's settings with the seed that was used."""
        seed = secrets.randbits(31) if adapter.seed is None else adapter.seed
        lora = LoraConfig(rank=adapter.rank, alpha=ALPHA, targets=lora_targets(self.base, adapter))
        config = LocalBackendConfig(lora=lora, threads=self._threads)
        try:
            backend = ServedLocalBackend(self._model, config, seed=seed, weights=self.base)
        except BackendError as error:
            raise ProtocolError(str(error)) from error
        return backend, replace(adapter, seed=seed)


def lora_targets(base: PreTrainedModel, adapter: AdapterSpec) -> list[str] | Literal["all-linear"]:
    """Return the name suffixes of the linear layers to adapt. In PEFT, all-linear means all linear layers
    except the output layer."""
    if adapter.train_attn and adapter.train_mlp and not adapter.train_unembed:
        return "all-linear"
    head = base.get_output_embeddings()
    suffixes: set[str] = set()
    for name, module in base.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module is head:
            is_trained = adapter.train_unembed
        else:
            is_trained = adapter.train_attn if "attn" in name or "attention" in name else adapter.train_mlp
        if is_trained:
            suffixes.add(".".join(name.split(".")[-2:]))
    if not suffixes:
        raise ProtocolError("train_attn, train_mlp and train_unembed are all false; set at least one of them")
    return sorted(suffixes)
