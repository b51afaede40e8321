"""Trains with torch on this machine: a LoRA adapter, or all weights.

All work runs in one thread, in the order it was asked for, so the event loop stays free and calls may
be pipelined. On a CPU the same calls with the same seed and threads give the same bits.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from instar.backends.base import Backend, BackendCapabilities, ForwardBackwardResult, OptimStepResult
from instar.backends.check import check_samples
from instar.backends.local import losses, state
from instar.backends.local.memory import keep_freed_pages
from instar.backends.local.model import TrainedModel, load_frozen, load_model
from instar.backends.local.pack import PackedRow, pack, split_micro_batches
from instar.backends.weight_export import has_adapter_on_tied_head, iterate_served_weights
from instar.config import AdamConfig, LocalBackendConfig, LossConfig, ModelConfig
from instar.errors import BackendError, NonFiniteError
from instar.types import Artifact, Floats, Sample

T = TypeVar("T")

CHUNK_BYTES = 128 * 2**20
"""Bytes of weights that are handed out at once."""
RNG_LOCK = threading.Lock()
"""Torch's generator is one for the process: backends beside each other draw and restore in turn."""


class LocalBackend(Backend):
    """``weights``, from `load_base`, are the base model's: backends with adapters may share them."""

    def __init__(
        self,
        model: ModelConfig,
        config: LocalBackendConfig,
        *,
        seed: int = 0,
        weights: PreTrainedModel | None = None,
    ) -> None:
        keep_freed_pages()
        self._config = config
        self._base = model
        self._frozen: TrainedModel | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="instar-backend")
        try:
            self._pool.submit(self._start, model, seed, weights).result()
        except BaseException:
            self._pool.shutdown(wait=False)
            raise

    def _start(self, model: ModelConfig, seed: int, weights: PreTrainedModel | None) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with RNG_LOCK:
            # Torch starts from a random one, and what a checkpoint holds has to be the run's own.
            torch.manual_seed(seed)
            self._model = load_model(model, self._config, seed, weights)
        self._parameters = self._model.parameters
        # Every field is set again at each step; fused is the fastest on CPU and GPU alike.
        self._optimizer = torch.optim.AdamW(list(self._parameters.values()), fused=True)
        self._optim_steps = 0

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise BackendError("the backend is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def use_cores(self, count: int) -> None:
        """The config's own number, where it gives one, stays."""
        if self._config.threads is None and not self._closed:
            self._pool.submit(torch.set_num_threads, count)

    @property
    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(
            losses=losses.LOSSES,
            artifacts=frozenset({"weights" if self._config.lora is None else "adapter"}),
            full_finetuning=True,
            reference=True,
            live=not has_adapter_on_tied_head(self._model.causal),
        )

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        weights = await self._run(lambda: iterate_served_weights(self._model.causal, self._model.dtype))
        # Many at a time: going to the thread and back costs more than merging a small layer on a GPU.
        while part := await self._run(lambda: _take_chunk(weights, CHUNK_BYTES)):
            for named in part:
                yield named

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._run(lambda: self._forward(samples, self._model))

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._run(lambda: self._reference(samples))

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
        await asyncio.get_running_loop().run_in_executor(self._pool, self._free)
        self._pool.shutdown(wait=True)

    def _free(self) -> None:
        del self._model, self._parameters, self._optimizer
        self._frozen = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- in the thread -------------------------------------------------------------------------

    def _forward(self, samples: Sequence[Sample], model: TrainedModel) -> list[Floats]:
        check_samples(samples, model.vocab_size, model.max_tokens)
        results = [np.full(len(sample), np.nan, np.float32) for sample in samples]
        sequences = [sample.token_ids for sample in samples]
        for members in split_micro_batches(sequences, self._config.micro_batch_tokens):
            packed = pack([sequences[i] for i in members])
            wanted = np.flatnonzero(packed.previous >= 0)
            if len(wanted) == 0:
                continue
            with torch.no_grad():
                values = model.logprobs(packed, wanted)
            _scatter(packed, wanted, values, [results[i] for i in members])
        return results

    def _reference(self, samples: Sequence[Sample]) -> list[Floats]:
        if self._model.adapter is not None:
            with self._model.adapter.disable_adapter():
                return self._forward(samples, self._model)
        if self._frozen is None:
            self._frozen = load_frozen(self._base, self._config)
        return self._forward(samples, self._frozen)

    def _forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        check_samples(samples, self._model.vocab_size, self._model.max_tokens, loss)
        results = [np.full(len(sample), np.nan, np.float32) for sample in samples]
        # A sample without trained tokens has no part in the loss, so it is not computed.
        trained = [i for i, sample in enumerate(samples) if (sample.mask > 0).any()]
        sequences = [samples[i].token_ids for i in trained]
        before = {name: p.grad for name, p in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        total, distinct, parts = 0.0, 0, list[losses.LossSums]()
        try:
            for chosen in split_micro_batches(sequences, self._config.micro_batch_tokens):
                members = [trained[i] for i in chosen]
                packed = pack([samples[i].token_ids for i in members])
                wanted = _trained_positions(packed, [samples[i] for i in members])
                values = self._model.logprobs(packed, wanted)
                value, sums = self._micro_loss(packed, wanted, values, [samples[i] for i in members], loss)
                value.backward()
                _scatter(packed, wanted, values.detach(), [results[i] for i in members])
                total += float(value.detach())
                distinct += len(packed)
                parts.append(sums)
        except BaseException:
            self._restore(before)
            raise
        self._accumulate(before)
        for sample, result in zip(samples, results, strict=True):
            # A token that another sample trains is computed for this one too, but not asked for.
            result[sample.mask <= 0] = np.nan
        metrics = losses.metrics(loss, parts)
        metrics["distinct_tokens"] = float(distinct)
        metrics["micro_batches"] = float(len(parts))
        return ForwardBackwardResult(total, results, metrics)

    def _micro_loss(
        self,
        packed: PackedRow,
        wanted: np.ndarray[tuple[int], np.dtype[np.int64]],
        values: Tensor,
        samples: Sequence[Sample],
        loss: LossConfig,
    ) -> tuple[Tensor, losses.LossSums]:
        """Raises NonFiniteError, naming the samples, before any gradient is taken."""
        places = [path[sample.mask > 0] for path, sample in zip(packed.paths, samples, strict=True)]
        index = torch.from_numpy(np.searchsorted(wanted, np.concatenate(places)))

        def gather(arrays: Sequence[Floats]) -> Tensor:
            flat = [array[sample.mask > 0] for array, sample in zip(arrays, samples, strict=True)]
            return torch.from_numpy(np.concatenate(flat).astype(np.float32)).to(values.device)

        tokens = losses.TrainedTokens(
            mask=gather([sample.mask for sample in samples]),
            advantages=gather([sample.advantages for sample in samples]),
            logprobs=gather([sample.logprobs for sample in samples]),
        )
        value, sums = losses.token_loss(loss, values[index.to(values.device)], tokens)
        if not math.isfinite(number := float(value.detach())):
            keys = ", ".join(sample.sample_key for sample in samples[:4])
            raise NonFiniteError(f"the {loss.name} loss is {number} on {len(samples)} samples ({keys}, ...)")
        return value, sums

    def _restore(self, before: dict[str, Tensor | None]) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = before[name]

    def _accumulate(self, before: dict[str, Tensor | None]) -> None:
        """This call's gradient on top of what was there."""
        for name, parameter in self._parameters.items():
            old = before[name]
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    def _optim_step(self, adam: AdamConfig) -> OptimStepResult:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise BackendError("optim_step without a gradient: nothing was trained on since the last step")
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
        clipped = 0.0 < adam.grad_clip_norm < grad_norm
        return OptimStepResult(grad_norm, {"lr": adam.lr, "grad_clipped": float(clipped)})

    def _publish(self, path: Path) -> Artifact:
        state.write_folder(path, self._model.write)
        return Artifact("weights" if self._config.lora is None else "adapter", str(path.resolve()))

    def _save_state(self, path: Path) -> None:
        with RNG_LOCK:
            state.save_training(path, self._parameters, self._optimizer, {"optim_steps": self._optim_steps})

    def _load_state(self, path: Path, optimizer: bool) -> None:
        with RNG_LOCK:
            counters = state.load_training(path, self._parameters, self._optimizer, with_optimizer=optimizer)
        self._optim_steps = counters["optim_steps"] if optimizer else 0


def _trained_positions(
    packed: PackedRow, samples: Sequence[Sample]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where the trained tokens stand in the row, each once, ascending."""
    places = [path[sample.mask > 0] for path, sample in zip(packed.paths, samples, strict=True)]
    return np.unique(np.concatenate(places))


def _scatter(
    packed: PackedRow,
    wanted: np.ndarray[tuple[int], np.dtype[np.int64]],
    values: Tensor,
    results: Sequence[Floats],
) -> None:
    """Write packed logprobs to every sample that has the token."""
    row = np.full(len(packed), np.nan, np.float32)
    row[wanted] = values.float().cpu().numpy()
    for path, result in zip(packed.paths, results, strict=True):
        result[:] = row[path]


def _take_chunk(weights: Iterator[tuple[str, Tensor]], most: int) -> list[tuple[str, Tensor]]:
    """The next ones, of so many bytes or little more; none at the end."""
    found: list[tuple[str, Tensor]] = []
    for named in weights:
        found.append(named)
        most -= named[1].nbytes
        if most <= 0:
            break
    return found
