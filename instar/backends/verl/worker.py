"""A rank of the verl backend: verl's training worker in a Ray actor, with Instar's losses and file formats.

verl provides the model, sharding, forward and backward passes, clipping, optimizer and checkpoints. Instar
changes three things: losses are sums over the tokens of all ranks, while verl averages over the ranks; a call
whose loss is not finite accumulates no gradient; and policies are written in the format that engines load.
"""

# verl is installed in a separate environment.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if os.environ.get("INSTAR_VERL_DEVICE") == "cpu":
    from instar.backends.verl.cpu import use_cpu

    use_cpu()

from verl.utils import tensordict_utils as tu
from verl.utils.distributed import create_tcp_store
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from instar.backends.local.losses import TrainedTokens, compute_token_loss
from instar.backends.local.state import write_adapter_files, write_weights
from instar.backends.verl.sharding import RankResult, RankSample, SerializedWeight, WorkerSettings
from instar.backends.weight_export import iterate_served_weights
from instar.config import AdamConfig, LossConfig
from instar.types import Floats


class InstarWorker(TinkerTrainingWorker):
    def __init__(self, settings: WorkerSettings) -> None:
        _init_process_group(settings)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        _allow_numpy_random_state()
        super().__init__(_make_training_config(settings))
        self._settings = settings
        self._export_dtype = torch.float32 if settings.dtype == "fp32" else torch.bfloat16

    # --- called by the backend ---

    def start(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.reset()
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed over the ranks, because the losses are sums and Gloo has no average.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                setattr(module, "attention_dropout", 0.0)  # noqa: B010 - torch types it as a Module

    @property
    def _module(self) -> nn.Module:
        return cast(nn.Module, self.engine.module)

    def logprobs(self, samples: Sequence[RankSample], max_tokens: int, use_base_model: bool) -> list[Floats]:
        data = _make_tensordict(samples, max_tokens)
        tu.assign_non_tensor(data, compute_loss=False, no_lora_adapter=use_base_model)
        return _unshift(self.infer_batch(data)["log_probs"])

    def train(self, samples: Sequence[RankSample], max_tokens: int, loss: LossConfig) -> RankResult:
        """Accumulate the samples' gradient, unless the loss of any rank is not finite."""
        self.set_loss_fn(partial(_sum_loss, config=loss))
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        previous_grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        output = self.forward_backward(_make_tensordict(samples, max_tokens))
        finite_flags: list[bool] = tu.get(output, "finite")
        is_finite = _is_true_on_all_ranks(all(finite_flags))
        for parameter, grad in zip(parameters, previous_grads, strict=True):
            if not is_finite:
                parameter.grad = grad
            elif grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        return RankResult(is_finite, _unshift(output["log_probs"]), len(finite_flags))

    def step(self, adam: AdamConfig) -> float:
        """Apply the gradient, clear it and return its norm before clipping. verl skips the update if the norm
        is not finite, but still clears the gradient."""
        self.engine.optimizer_config.clip_grad = adam.grad_clip_norm or math.inf
        settings = {
            "lr": adam.lr,
            "betas": (adam.beta1, adam.beta2),
            "eps": adam.eps,
            "weight_decay": adam.weight_decay,
        }
        return float(self.optimizer_step(settings)["grad_norm"])

    def has_finite_weights(self) -> bool:
        """Return True if all trained weights are finite on all ranks."""
        self._module.state_dict()  # discards gathered weights, as in `next_weights`
        trained = (p.detach() for p in self._module.parameters() if p.requires_grad)
        shards = (p.to_local() if isinstance(p, DTensor) else p for p in trained)
        return _is_true_on_all_ranks(all(bool(torch.isfinite(shard).all()) for shard in shards))

    def save(self, folder: str) -> None:
        self.save_checkpoint(folder)

    def load(self, folder: str, with_optimizer: bool) -> None:
        manager = self.engine.checkpoint_manager
        manager.checkpoint_load_contents = ["model", "optimizer", "extra"] if with_optimizer else ["model"]
        self.engine.optimizer.zero_grad()
        self.engine.optimizer.state.clear()
        self.load_checkpoint(folder)

    def publish(self, folder: str) -> None:
        """Write the policy on rank 0. Every rank must call this method, because the shards are gathered."""
        tensors, adapter = self.engine.get_per_tensor_param(base_sync_done=True)
        if adapter is None:
            self._publish_weights(tensors, Path(folder))
        elif self.rank == 0:
            weights = {name: tensor.float() for name, tensor in tensors}
            adapter["base_model_name_or_path"] = self._settings.folder
            write_adapter_files(weights, adapter, Path(folder))
        dist.barrier()

    def _publish_weights(self, tensors: Any, folder: Path) -> None:
        # Tied weights are one tensor with two names, which is written under the first name.
        distinct = dict(self._module.named_parameters())
        names = dict(self._module.named_parameters(remove_duplicate=False))
        weights: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if self.rank == 0 and (name in distinct or name not in names):
                weights[name] = tensor.detach().to("cpu", self._export_dtype)
        if self.rank == 0:
            write_weights(weights, Path(self._settings.folder), folder, self._export_dtype)

    def next_weights(self, is_first: bool, max_bytes: int) -> tuple[list[SerializedWeight], bool]:
        """Return about ``max_bytes`` of the weights that an engine serves, and True if there may be more.
        Every rank must call this method, because the shards are gathered, but only rank 0 returns weights."""
        if is_first:
            self._module.state_dict()  # discards gathered weights of an earlier pass, which may be outdated
            module: Any = self._module
            model = module.base_model.model if hasattr(module, "peft_config") else module
            self._weight_iterator = iterate_served_weights(model, self._export_dtype)
        weights: list[SerializedWeight] = []
        exported_bytes = 0
        for name, tensor in self._weight_iterator:
            exported_bytes += tensor.nbytes
            if self.rank == 0:
                content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                dtype_name = str(tensor.dtype).removeprefix("torch.")
                weights.append(SerializedWeight(name, dtype_name, list(tensor.shape), content))
            if exported_bytes >= max_bytes:
                return weights, True
        return weights, False

    # --- called by verl ---

    def _postprocess_output(self, output: dict[str, Any], **_: Any) -> Any:
        """Return the logprobs of a pass and, for each micro-batch, True if its loss is finite. The overridden
        method averages the loss over ranks and gathers memory and speed metrics."""
        finite = output["metrics"].get("finite", [])
        return tu.get_tensordict({"log_probs": output["model_output"]["log_probs"]}, {"finite": finite})


def _is_true_on_all_ranks(value: bool) -> bool:
    minimum = torch.tensor([int(value)])
    dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return bool(minimum.item())


def _sum_loss(
    *, config: LossConfig, model_output: dict[str, Tensor], data: Any, dp_group: Any
) -> tuple[Tensor, dict[str, bool]]:
    """Return the loss of a micro-batch, and the metric ``finite``, which is True if the loss is finite.
    In all tensors, position i of a sample refers to its token i + 1."""
    new_logprobs = model_output["log_probs"].values().float()
    mask = data["loss_mask"].values()
    is_trained = mask > 0
    tokens = TrainedTokens(
        mask=mask[is_trained],
        advantages=data["advantages"].values()[is_trained],
        logprobs=data["old_log_probs"].values()[is_trained],
    )
    loss, _ = compute_token_loss(config, new_logprobs[is_trained], tokens)
    return loss, {"finite": math.isfinite(float(loss.detach()))}


def _make_tensordict(samples: Sequence[RankSample], max_tokens: int) -> Any:
    """Return verl's jagged TensorDict. Position i of mask, advantages and logprobs refers to token i + 1."""

    def make_jagged(arrays: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> Tensor:
        return torch.nested.as_nested_tensor(
            [torch.from_numpy(array).to(dtype) for array in arrays], layout=torch.jagged
        )

    def shift_left(array: Floats) -> Floats:
        return np.append(array[1:], np.float32(0))

    tensors = {
        "input_ids": make_jagged([sample.token_ids for sample in samples], torch.int64),
        "position_ids": make_jagged([np.arange(len(sample.token_ids)) for sample in samples], torch.int64),
        "loss_mask": make_jagged([shift_left(sample.mask) for sample in samples], torch.float32),
        "advantages": make_jagged([shift_left(sample.advantages) for sample in samples], torch.float32),
        "old_log_probs": make_jagged([shift_left(sample.logprobs) for sample in samples], torch.float32),
    }
    settings = {"temperature": 1.0, "max_token_len_per_gpu": max_tokens, "use_dynamic_bsz": True}
    return tu.get_tensordict(tensors, settings)


def _unshift(log_probs: Tensor) -> list[Floats]:
    """Undo the shift of `_make_tensordict`, so that index i refers to token i (NaN at index 0)."""
    rows = [row.float().cpu().numpy() for row in log_probs.unbind()]
    return [np.concatenate([np.full(1, np.nan, np.float32), row[:-1]]) for row in rows]


def _init_process_group(settings: WorkerSettings) -> None:
    """Create the process group for verl. verl's default would listen on every interface, use torch's timeouts
    and, on a CPU, request the backend "cpu:gloo,cpu:gloo", which torch rejects."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=settings.call_timeout)
    server = socket.create_server((host, port)) if rank == 0 else None
    store = create_tcp_store(
        host, port, server, world_size=world, is_master=rank == 0, timeout=timeout, use_libuv=True
    )
    backend = "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _make_training_config(settings: WorkerSettings) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )

    lora = settings.lora
    adapter: dict[str, Any] = {"lora_rank": 0}
    if lora is not None:
        adapter = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets}
    compute_dtype = "fp32" if settings.dtype == "fp32" else "bf16"
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=settings.folder,
            load_tokenizer=False,
            # Packing without padding needs FlashAttention, which CPUs and some GPUs do not support.
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            **adapter,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            # Without this size, verl leaves the root module's weights gathered after a forward pass. After an
            # optimizer step, the next pass would use these outdated weights.
            fsdp_size=settings.ranks,
            model_dtype="fp32",
            mixed_precision={"param_dtype": compute_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        # Every step sets all hyperparameters, so these defaults are never used.
        optimizer_config=FSDPOptimizerConfig(),
        checkpoint_config=CheckpointConfig(save_lora_only=lora is not None),
    )


def _allow_numpy_random_state() -> None:
    """Allow torch to load NumPy's random state from verl's checkpoints. They are pickled, and because of
    TORCH_FORCE_WEIGHTS_ONLY_LOAD, torch loads only tensors, plain values and the types allowed here."""
    from numpy._core.multiarray import _reconstruct  # pyright: ignore[reportPrivateUsage]

    torch.serialization.add_safe_globals(
        [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), type(np.dtype(np.int64))]
    )
