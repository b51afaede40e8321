"""Trains a LoRA adapter or all weights with torch in this process.

On a CPU, the same calls with the same seed and number of threads produce bit-identical results.
"""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from instar.backends.base import (
    NO_GRADIENT,
    BackendCapabilities,
    ForwardBackwardResult,
    OptimStepResult,
    make_torch_capabilities,
)
from instar.backends.check import check_samples, make_nan_logprobs, select_trained
from instar.backends.local import losses, state
from instar.backends.local.check import check_architecture
from instar.backends.local.model import TrainedModel, load_model, load_reference
from instar.backends.local.pack import IntArray, PackedRow, pack, split_micro_batches
from instar.backends.threaded import ThreadedBackend, do_nothing, in_thread
from instar.backends.weight_export import has_adapter_on_tied_head, iterate_served_weights
from instar.config import AdamConfig, LocalBackendConfig, LossConfig, ModelConfig
from instar.cpu import keep_freed_pages
from instar.errors import BackendError, NonFiniteError
from instar.types import Artifact, Floats, Sample

CHUNK_BYTES = 128 * 2**20
"""The approximate number of bytes that `tensors` exports each time it switches to the worker thread."""
RNG_LOCK = threading.Lock()
"""Held while a backend uses torch's random generator, which all backends in the process share."""


class LocalBackend(ThreadedBackend):
    """A backend that trains with torch. ``base_model`` is a model from `load_base`, which several backends
    with adapters can share. If it is None, the backend loads its own model."""

    def __init__(
        self,
        model: ModelConfig,
        config: LocalBackendConfig,
        *,
        seed: int = 0,
        base_model: PreTrainedModel | None = None,
    ) -> None:
        keep_freed_pages()
        super().__init__("instar-backend")
        self._config = config
        self._model_config = model
        self._reference_model: TrainedModel | None = None
        try:
            self._pool.submit(self._start, model, seed, base_model).result()
        except BaseException:  # including an interrupt: the thread must not keep running
            self._pool.shutdown(wait=False)
            raise

    def _start(self, model: ModelConfig, seed: int, base_model: PreTrainedModel | None) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with RNG_LOCK:
            if base_model is None:
                check_architecture(model)
            # torch starts from a random seed, but the RNG state in a checkpoint must be reproducible.
            torch.manual_seed(seed)
            self._model = load_model(model, self._config, seed, base_model)
        self._parameters = self._model.trained_parameters
        # Every step sets all hyperparameters, so no default is used. The fused implementation is the fastest.
        self._optimizer = torch.optim.AdamW(list(self._parameters.values()), fused=True)
        self._optim_steps = 0

    def use_cores(self, count: int) -> None:
        # A thread count in the config takes precedence.
        if self._config.threads is None and not self._is_closed:
            self._pool.submit(torch.set_num_threads, count)

    def set_pause(self, pause: Callable[[], None]) -> None:
        super().set_pause(pause)
        self._pool.submit(self._model.pause_between_layers, pause).result()

    @property
    def capabilities(self) -> BackendCapabilities:
        return make_torch_capabilities(
            self._config.lora,
            has_reference=True,
            loads_adapters=True,
            can_sync_live=not has_adapter_on_tied_head(self._model.model),
        )

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        weights = await self._run(lambda: iterate_served_weights(self._model.model, self._model.dtype))
        # Switching to the worker thread costs more than merging a small layer on a GPU, so the weights are
        # exported in chunks.
        while chunk := await self._run(lambda: _take_chunk(weights, CHUNK_BYTES)):
            for name_and_tensor in chunk:
                yield name_and_tensor

    @in_thread
    def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return self._forward(samples, self._model)

    @in_thread
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        if self._model.adapter is not None:
            with self._model.adapter.disable_adapter():
                return self._forward(samples, self._model)
        if self._reference_model is None:
            self._reference_model = load_reference(self._model_config, self._config)
            if self._pause is not do_nothing:
                self._reference_model.pause_between_layers(self._pause)
        return self._forward(samples, self._reference_model)

    @in_thread
    def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        check_samples(samples, self._model.vocab_size, self._model.max_tokens, loss)
        results = make_nan_logprobs(samples)
        trained_indices = select_trained(samples)
        sequences = [samples[i].token_ids for i in trained_indices]
        previous_grads = {name: p.grad for name, p in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        total_loss, distinct_tokens, micro_batch_sums = 0.0, 0, list[losses.LossSums]()
        try:
            for batch in split_micro_batches(sequences, self._config.micro_batch_tokens):
                batch_samples = [samples[trained_indices[i]] for i in batch]
                packed = pack([sample.token_ids for sample in batch_samples])
                pairs = zip(packed.paths, batch_samples, strict=True)
                trained_positions = np.concatenate([path[sample.mask > 0] for path, sample in pairs])
                positions, inverse = np.unique(trained_positions, return_inverse=True)
                logprobs = self._model.compute_logprobs(packed, positions)
                token_logprobs = logprobs[torch.from_numpy(inverse).to(logprobs.device)]
                value, sums = _compute_loss(token_logprobs, batch_samples, loss)
                value.backward()
                _scatter(packed, positions, logprobs.detach(), [results[trained_indices[i]] for i in batch])
                total_loss += float(value.detach())
                distinct_tokens += len(packed)
                micro_batch_sums.append(sums)
        except BaseException:  # including an interrupt: the call must not leave a partial gradient
            for name, parameter in self._parameters.items():
                parameter.grad = previous_grads[name]
            raise
        for name, parameter in self._parameters.items():
            if (grad := previous_grads[name]) is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        for sample, result in zip(samples, results, strict=True):
            # Logprobs were also computed for tokens that are trained only in another sample.
            result[sample.mask <= 0] = np.nan
        metrics = losses.compute_metrics(loss, micro_batch_sums)
        metrics["distinct_tokens"] = float(distinct_tokens)
        metrics["micro_batches"] = float(len(micro_batch_sums))
        return ForwardBackwardResult(total_loss, results, metrics)

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        return await self._run(lambda: self._optim_step(adam))

    @in_thread
    def publish(self, path: Path) -> Artifact:
        state.write_folder(path, self._model.write)
        return Artifact("weights" if self._config.lora is None else "adapter", str(path.resolve()))

    @in_thread
    def save_state(self, path: Path) -> None:
        counters = {"optim_steps": self._optim_steps}
        with RNG_LOCK:
            state.save_training_state(path, self._parameters, self._optimizer, counters)

    @in_thread
    def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        with RNG_LOCK:
            counters = state.load_training_state(
                path, self._parameters, self._optimizer, with_optimizer=optimizer
            )
        self._optim_steps = counters["optim_steps"] if optimizer else 0

    @in_thread
    def load_adapter(self, source: str) -> None:
        state.load_adapter_weights(Path(source), self._parameters)
        self._optimizer.state.clear()
        self._optim_steps = 0

    # --- called in the worker thread ---

    def _release(self) -> None:
        del self._model, self._parameters, self._optimizer
        self._reference_model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _forward(self, samples: Sequence[Sample], model: TrainedModel) -> list[Floats]:
        check_samples(samples, model.vocab_size, model.max_tokens)
        results = make_nan_logprobs(samples)
        sequences = [sample.token_ids for sample in samples]
        for batch in split_micro_batches(sequences, self._config.micro_batch_tokens):
            packed = pack([sequences[i] for i in batch])
            positions = np.flatnonzero(packed.previous >= 0)
            if len(positions) == 0:
                continue
            with torch.no_grad():
                logprobs = model.compute_logprobs(packed, positions)
            _scatter(packed, positions, logprobs, [results[i] for i in batch])
        return results

    def _optim_step(self, adam: AdamConfig) -> OptimStepResult:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise BackendError(NO_GRADIENT)
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"the gradient norm is {grad_norm}; the step was not applied")
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), adam.grad_clip_norm, norm)
        for group in self._optimizer.param_groups:
            group.update(
                lr=adam.lr, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._optim_steps += 1
        if name := state.find_non_finite(self._parameters):
            raise NonFiniteError(
                f"after the step, {name} has non-finite values; load an earlier state and lower the "
                "learning rate"
            )
        return OptimStepResult.from_norm(adam, grad_norm)


def _compute_loss(
    logprobs: Tensor, samples: Sequence[Sample], loss: LossConfig
) -> tuple[Tensor, losses.LossSums]:
    def gather(name: str) -> Tensor:
        flat = np.concatenate([getattr(sample, name)[sample.mask > 0] for sample in samples])
        return torch.from_numpy(flat.astype(np.float32)).to(logprobs.device)

    tokens = losses.TrainedTokens(gather("mask"), gather("advantages"), gather("logprobs"))
    value, sums = losses.compute_token_loss(loss, logprobs, tokens)
    if not math.isfinite(loss_value := float(value.detach())):
        keys = ", ".join(sample.sample_key for sample in samples[:4]) + (", ..." if len(samples) > 4 else "")
        raise NonFiniteError(f"the {loss.name} loss is {loss_value} on {len(samples)} samples ({keys})")
    return value, sums


def _scatter(packed: PackedRow, positions: IntArray, logprobs: Tensor, results: Sequence[Floats]) -> None:
    """Write each packed token's logprob to the result of every sample that contains the token."""
    row = np.full(len(packed), np.nan, np.float32)
    row[positions] = logprobs.float().cpu().numpy()
    for path, result in zip(packed.paths, results, strict=True):
        result[:] = row[path]


def _take_chunk(weights: Iterator[tuple[str, Tensor]], remaining_bytes: int) -> list[tuple[str, Tensor]]:
    chunk: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        chunk.append((name, tensor))
        remaining_bytes -= tensor.nbytes
        if remaining_bytes <= 0:
            break
    return chunk
