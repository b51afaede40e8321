"""Runs inside vLLM's workers: receives new weights next to the served ones, then replaces the served ones.

Servers are started with ``--worker-extension-cls instar.engines.vllm.extension.WeightReceiver``. The methods
are called by name (`/collective_rpc`) with text and return a dict: ``error`` is the message of a failure,
``touched`` is true if the served weights are no longer intact. Nothing that arrives is unpickled.
"""

# vLLM runs in its own environment, with torch and, for the route `ray`, Ray.
# pyright: reportMissingImports=false
from __future__ import annotations

import base64
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from instar.engines.vllm.adapter_prefetch import AdapterPrefetcher

RAY_SECONDS = 60.0
"""The deadline for one chunk from Ray's object store."""
RAY_RECONNECT_SECONDS = 10**6
"""The number of seconds that a worker keeps running after it has lost its Ray cluster."""
PLAIN_METHODS = frozenset({"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""vLLM's methods for layers whose parameters have the same layout as in the model's files."""


class WeightReceiver(AdapterPrefetcher):
    """A mixin for vLLM's worker class that receives weights. Its names must not occur in that class."""

    device: torch.device
    model_runner: Any
    model_config: Any

    def instar_ends(self) -> dict[str, Any]:
        """Return the worker's GPU, and whether it supports Ray and NCCL. These decide which live routes are
        possible."""
        engine = getattr(self, "weight_transfer_engine", None)
        return {"gpu": _gpu(self.device), "ray": _has_ray(), "nccl": type(engine).__name__.startswith("NCCL")}

    def instar_stage(self, text: str) -> dict[str, Any]:
        """Receive some weights of the policy ``key``. Weights of a different policy are dropped, and so are
        earlier weights of this policy if the sender starts over."""
        body: dict[str, Any] = json.loads(text)
        try:
            return self._instar_staged.receive(body, self.device)
        except Exception as error:  # noqa: BLE001 - every error is returned to the sender
            return {"error": f"{type(error).__name__}: {error}"}

    def instar_commit(self, text: str) -> dict[str, Any]:
        """Replace the served weights with the staged ones. The server must be paused."""
        staged, key = self._instar_staged, json.loads(text)["key"]
        if staged.key != key or not staged.weights:
            return {"error": f"no weights are staged for {key}", "touched": False}
        try:
            staged.load_into(self.model_runner.get_model(), self.model_config, self.device)
        except Exception as error:  # noqa: BLE001 - every error is returned to the sender
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        finally:
            staged.clear()
        return {}

    def instar_reload(self, text: str) -> dict[str, Any]:
        """Replace the served weights with the ones in a folder. The server must be paused."""
        model, weights = self.model_runner.get_model(), read_folder(Path(json.loads(text)["path"]))
        try:
            if self.device.type == "cuda" and has_file_layout(model):
                load_in_place(model, weights, None)
            else:
                load_through_layers(model, self.model_config, weights)
        except Exception as error:  # noqa: BLE001 - every error is returned to the sender
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        return {}

    @property
    def _instar_staged(self) -> StagedWeights:
        if "instar_staged" not in self.__dict__:
            self.__dict__["instar_staged"] = StagedWeights()
        return self.__dict__["instar_staged"]


@dataclass
class MappedBuffer:
    """A buffer of the trainer, mapped into this process, and the weights in it."""

    name: str
    buffer: Tensor
    weights: list[tuple[str, Tensor]]
    plan: CopyPlan | None = None


@dataclass
class StagedWeights:
    """The weights of one policy that have arrived so far."""

    key: str = ""
    weights: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])
    chunks: set[int] = field(default_factory=set[int])
    mapped: MappedBuffer | None = None
    fetch_chunk: Callable[[dict[str, Any]], list[tuple[str, Tensor]]] = field(
        default_factory=lambda: _fetch_ray_chunk
    )

    def receive(self, body: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if "probe" in body:
            return _probe(body["probe"], device)
        if body["key"] != self.key or body.get("chunk") == 0:
            self.clear()
            self.key = body["key"]
        if "buffer" in body:
            return self._map(body, device)
        if body["chunk"] not in self.chunks:
            self.weights += self.fetch_chunk(body)
            self.chunks.add(body["chunk"])
        return {"chunks": len(self.chunks)}

    def _map(self, body: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if self.mapped is None or self.mapped.name != body["buffer"]:
            if "handle" not in body:
                return {"known": False}
            self.mapped = None
            buffer = open_buffer(body["handle"], device)
            self.mapped = MappedBuffer(body["buffer"], buffer, buffer_views(buffer, body["layout"]))
        self.weights = self.mapped.weights
        return {"known": True}

    def load_into(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        mapped = self.mapped if self.mapped and self.mapped.weights is self.weights else None
        if mapped and mapped.plan:
            mapped.plan.run()
        elif device.type == "cuda" and has_file_layout(model):
            plan = load_in_place(model, self.weights, mapped.buffer if mapped else None)
            if mapped:
                mapped.plan = plan
        else:
            load_through_layers(model, model_config, self.weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def clear(self) -> None:
        """Drop the weights. A mapped buffer stays open, because the next policy is written to it."""
        self.key, self.weights = "", []
        self.chunks.clear()


# --- loading into the model ---------------------------------------------------------------------


class CopyPlan:
    """The places in the model to which the parts of a buffer are copied."""

    def __init__(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        self._targets = targets
        self._sources = sources

    @torch.no_grad()
    def run(self) -> None:
        torch._foreach_copy_(self._targets, self._sources)  # pyright: ignore


class _CopyRecorder(TorchDispatchMode):
    """Records every copy while a model loads its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def load_in_place(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], buffer: Tensor | None
) -> CopyPlan | None:
    """Load the weights and return where each one was copied, so that later loads are plain copies. Returns
    None if plain copies are not possible: a weight was changed, split among workers, or copied to a place
    that is not a parameter."""
    needed = {name for name, _ in model.named_parameters()}
    with torch.no_grad(), _CopyRecorder() as recorder:
        loaded: set[str] | None = model.load_weights(iter(weights))  # pyright: ignore[reportCallIssue]
    _require_all(needed, loaded)
    if buffer is None:
        return None
    parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    origin = buffer.untyped_storage().data_ptr()
    is_plain_copy = all(
        source.untyped_storage().data_ptr() == origin
        and target.untyped_storage().data_ptr() in parameter_storages
        and target.dtype == source.dtype
        for target, source in recorder.copies
    )
    copied = sum(source.nbytes for _, source in recorder.copies)
    if not is_plain_copy or copied != sum(tensor.nbytes for _, tensor in weights):
        return None
    return CopyPlan([target for target, _ in recorder.copies], [source for _, source in recorder.copies])


def load_through_layers(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load with vLLM's own code, for layers that store their weights in a different form: on a CPU, or
    quantized."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    needed = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded: set[str] | None = model.load_weights(iter(weights))  # pyright: ignore[reportCallIssue]
        finalize_layerwise_reload(model, model_config)
    except BaseException:  # even after an error, the next load must be possible
        _reset_layers(model)
        raise
    _require_all(needed, loaded)
    _pack_tied(model)


def _pack_tied(model: nn.Module) -> None:
    """Update vLLM's packed copy of an output layer that is tied to the embedding. On a CPU, vLLM does not
    update it."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and type(layer.quant_method).__name__ == "UnquantizedEmbeddingMethod":
            cast(Any, layer.quant_method).process_weights_after_loading(layer)


def _reset_layers(model: nn.Module) -> None:
    """Drop partially loaded layers. vLLM keeps them until they are complete, so later loads would fail."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()


def has_file_layout(model: nn.Module) -> bool:
    """Return True if the parameters have the same layout as the model's files, so that loading is copying."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    return methods <= PLAIN_METHODS


def _require_all(needed: set[str], loaded: set[str] | None) -> None:
    if loaded is not None and (missing := sorted(needed - loaded)):
        raise ValueError(f"{len(missing)} parameters did not arrive, for example {missing[0]}")


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with cast(Any, safe_open(file, "pt")) as opened:
            for name in opened.keys():  # noqa: SIM118 - no dict
                yield name, opened.get_tensor(name)


# --- receiving from the trainer -----------------------------------------------------------------


def open_buffer(handle: dict[str, Any], device: torch.device) -> Tensor:
    """Return the trainer's buffer, in GPU or main memory, mapped as bytes."""
    if handle["kind"] == "memory":
        return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)
    if handle["gpu"] != _gpu(device):
        raise ValueError(f"the trainer's buffer is on GPU {handle['gpu']}, this worker on {_gpu(device)}")
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle["parts"]]
    size = (handle["size"],)
    return rebuild_cuda_tensor(
        Tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index or 0, *parts
    )


def buffer_views(buffer: Tensor, layout: Sequence[Sequence[Any]]) -> list[tuple[str, Tensor]]:
    """Return the tensors in a buffer. A layout entry is (name, dtype, shape, first byte)."""
    views: list[tuple[str, Tensor]] = []
    for name, dtype_name, shape, start in layout:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * int(np.prod(shape))
        views.append((name, buffer[start:end].view(dtype).view(shape)))
    return views


def _probe(probe: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return whether this worker can read the trainer's memory or reach its mailbox."""
    if "path" in probe:
        content = torch.from_file(probe["path"], shared=True, size=probe["size"], dtype=torch.uint8)
        return {"content": bytes(content.tolist()).hex(), "gpu": _gpu(device)}
    _mailbox(probe)
    return {}


def _fetch_ray_chunk(body: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return a copy of one chunk in the object store. The store then has room for the next chunk."""
    import ray

    references = ray.get(_mailbox(body).take.remote(body["chunk"]), timeout=RAY_SECONDS)
    arrays = ray.get(references, timeout=RAY_SECONDS)
    weights: list[tuple[str, Tensor]] = []
    for (name, dtype_name, shape), array in zip(body["layout"], arrays, strict=True):
        tensor = torch.from_numpy(np.array(array)).view(getattr(torch, dtype_name)).view(shape)
        weights.append((name, tensor))
    return weights


def _mailbox(body: dict[str, Any]) -> Any:
    """Return the trainer's mailbox actor. Joins the trainer's Ray cluster if needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray stops this process a minute after it has lost the cluster.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RAY_RECONNECT_SECONDS))
    if body["auth"]:
        os.environ["RAY_AUTH_MODE"] = body["auth"]
    import ray
    from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

    if ray.is_initialized() and ray.get_runtime_context().gcs_address != body["address"]:
        ray.shutdown()
    if not ray.is_initialized():
        Config.initialize("")  # read the variables again: vLLM may have imported Ray earlier
        # Ray replaces the handler of the signal that tells vLLM to stop.
        before = signal.getsignal(signal.SIGTERM)
        ray.init(address=body["address"], log_to_driver=False, configure_logging=False)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return ray.get_actor(body["mailbox"], namespace=body["namespace"])


def _has_ray() -> bool:
    from importlib.util import find_spec

    return find_spec("ray") is not None


def _gpu(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device.index or 0).uuid)
