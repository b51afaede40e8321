"""What runs inside vLLM's workers: weights are taken in beside those that are served, then replace them.

Servers are started with ``--worker-extension-cls instar.engines.vllm.extension.WeightReceiver``. The methods
are called by name (`/collective_rpc`) with text, and answer with a dict: ``error`` in it says what failed,
``touched`` whether what was served is no longer whole. Nothing that arrives is unpickled.
"""

# vLLM lives in an environment of its own, with torch and, for the route `ray`, Ray.
# pyright: reportMissingImports=false
from __future__ import annotations

import base64
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from instar.engines.vllm.adapter_prefetch import AdapterPrefetcher

RAY_SECONDS = 60.0
"""Deadline of one chunk from Ray's object store."""
OUTLIVES_SECONDS = 10**6
"""How long a worker goes on without the Ray cluster that it has joined."""
PLAIN_METHODS = frozenset({"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""What vLLM calls the handling of layers whose parameters are as a model's files have them."""


class WeightReceiver(AdapterPrefetcher):
    """Mixed into vLLM's worker class; its names must be none of the worker's."""

    device: torch.device
    model_runner: Any
    model_config: Any

    def instar_ends(self) -> dict[str, Any]:
        """Which routes could end here."""
        engine = getattr(self, "weight_transfer_engine", None)
        return {"gpu": _gpu(self.device), "ray": _has_ray(), "nccl": type(engine).__name__.startswith("NCCL")}

    def instar_stage(self, text: str) -> dict[str, Any]:
        """A part of the weights of the policy ``key``; parts of another one are given up, and so is what came
        of this one where it is sent again from the start."""
        body: dict[str, Any] = json.loads(text)
        try:
            return self._instar_inbox.receive(body, self.device)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to the sender, and the worker lives
            return {"error": f"{type(error).__name__}: {error}"}

    def instar_commit(self, text: str) -> dict[str, Any]:
        """Put what was staged in place. The server is paused meanwhile."""
        inbox, key = self._instar_inbox, json.loads(text)["key"]
        if inbox.key != key or not inbox.weights:
            return {"error": f"nothing is staged for {key}", "touched": False}
        try:
            inbox.load_into(self.model_runner.get_model(), self.model_config, self.device)
        except Exception as error:  # noqa: BLE001 - as above
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        finally:
            inbox.clear()
        return {}

    def instar_reload(self, text: str) -> dict[str, Any]:
        """Put the full weights of a folder in place. The server is paused meanwhile."""
        model, weights = self.model_runner.get_model(), read_folder(Path(json.loads(text)["path"]))
        try:
            if self.device.type == "cuda" and has_file_layout(model):
                load_in_place(model, weights, None)
            else:
                load_through_layers(model, self.model_config, weights)
        except Exception as error:  # noqa: BLE001 - as above
            return {"error": f"{type(error).__name__}: {error}", "touched": True}
        return {}

    @property
    def _instar_inbox(self) -> StagedWeights:
        if "instar_inbox" not in self.__dict__:
            self.__dict__["instar_inbox"] = StagedWeights()
        return self.__dict__["instar_inbox"]


@dataclass
class MappedBuffer:
    """A buffer of the trainer's, open here, and the weights that lie in it."""

    name: str
    buffer: Tensor
    weights: list[tuple[str, Tensor]]
    plan: CopyPlan | None = None


@dataclass
class StagedWeights:
    """What has come so far for one policy."""

    key: str = ""
    weights: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])
    chunks: set[int] = field(default_factory=set[int])
    mapped: MappedBuffer | None = None

    def receive(self, body: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if "probe" in body:
            return _probe(body["probe"], device)
        if body["key"] != self.key or body.get("chunk") == 0:
            self.clear()
            self.key = body["key"]
        if "buffer" in body:
            return self._map(body, device)
        if body["chunk"] not in self.chunks:
            self.weights += _from_ray(body)
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
        """A buffer stays open: it is written again for the next policy."""
        self.key, self.weights = "", []
        self.chunks.clear()


# --- into the model -----------------------------------------------------------------------------


class CopyPlan:
    """Where each piece of a buffer goes in the model."""

    def __init__(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        self._targets = targets
        self._sources = sources

    @torch.no_grad()
    def run(self) -> None:
        torch._foreach_copy_(self._targets, self._sources)  # pyright: ignore


class _CopyRecorder(TorchDispatchMode):
    """Notes every copy while a model loads its weights."""

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
    """Load, and see where each weight went: from then on it is copied there straight. None where that cannot
    be told: a weight was changed on its way, split among several workers, or went to a place that is no
    parameter's."""
    needed = {name for name, _ in model.named_parameters()}
    with torch.no_grad(), _CopyRecorder() as recorder:
        loaded: set[str] | None = model.load_weights(iter(weights))  # pyright: ignore[reportCallIssue]
    _require_all(needed, loaded)
    if buffer is None:
        return None
    places = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    origin = buffer.untyped_storage().data_ptr()
    known = all(
        source.untyped_storage().data_ptr() == origin
        and target.untyped_storage().data_ptr() in places
        and target.dtype == source.dtype
        for target, source in recorder.copies
    )
    copied = sum(source.nbytes for _, source in recorder.copies)
    if not known or copied != sum(tensor.nbytes for _, tensor in weights):
        return None
    return CopyPlan([target for target, _ in recorder.copies], [source for _, source in recorder.copies])


def load_through_layers(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """vLLM's own way, for layers that keep their weights in another form than the files: on a CPU, or
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
    except BaseException:
        _give_up(model)
        raise
    _require_all(needed, loaded)
    _pack_tied(model)


def _pack_tied(model: nn.Module) -> None:
    """On a CPU vLLM keeps a packed copy of a matrix, and does not renew that of an output layer which shares
    its weights with the embedding."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and type(layer.quant_method).__name__ == "UnquantizedEmbeddingMethod":
            cast(Any, layer.quant_method).process_weights_after_loading(layer)


def _give_up(model: nn.Module) -> None:
    """vLLM holds on to what it was given of a layer until it has all: without this, nothing could be loaded
    after a load that failed."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()


def has_file_layout(model: nn.Module) -> bool:
    """Whether the parameters are as a model's files have them, so that loading is copying."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    return methods <= PLAIN_METHODS


def _require_all(needed: set[str], loaded: set[str] | None) -> None:
    if loaded is not None and (missing := sorted(needed - loaded)):
        raise ValueError(f"{len(missing)} parameters did not come, {missing[0]} for one")


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a folder, one after another."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with cast(Any, safe_open(file, "pt")) as opened:
            for name in opened.keys():  # noqa: SIM118 - no dict
                yield name, opened.get_tensor(name)


# --- from the trainer ---------------------------------------------------------------------------


def open_buffer(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The trainer's memory, as bytes: of the GPU, or of the machine."""
    if handle["kind"] == "memory":
        return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)
    if handle["gpu"] != _gpu(device):
        raise ValueError(f"the trainer's buffer is on GPU {handle['gpu']}, this worker on {_gpu(device)}")
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    given = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle["parts"]]
    size = (handle["size"],)
    return rebuild_cuda_tensor(
        Tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index or 0, *given
    )


def buffer_views(buffer: Tensor, layout: Sequence[Sequence[Any]]) -> list[tuple[str, Tensor]]:
    """The named tensors that lie in a buffer: (name, dtype, shape, first byte) each."""
    found: list[tuple[str, Tensor]] = []
    for name, dtype_name, shape, start in layout:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * int(np.prod(shape))
        found.append((name, buffer[start:end].view(dtype).view(shape)))
    return found


def _probe(probe: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Whether this worker reaches the trainer's memory, or its mailbox."""
    if "path" in probe:
        content = torch.from_file(probe["path"], shared=True, size=probe["size"], dtype=torch.uint8)
        return {"content": bytes(content.tolist()).hex(), "gpu": _gpu(device)}
    _mailbox(probe)
    return {}


def _from_ray(body: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Copied out of the object store, which then is free for the next chunk."""
    import ray

    references = ray.get(_mailbox(body).take.remote(body["chunk"]), timeout=RAY_SECONDS)
    arrays = ray.get(references, timeout=RAY_SECONDS)
    found: list[tuple[str, Tensor]] = []
    for (name, dtype_name, shape), array in zip(body["layout"], arrays, strict=True):
        tensor = torch.from_numpy(np.array(array)).view(getattr(torch, dtype_name)).view(shape)
        found.append((name, tensor))
    return found


def _mailbox(body: dict[str, Any]) -> Any:
    """Joins the trainer's Ray cluster first, where this process has not."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would end this process a minute after the cluster has gone.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(OUTLIVES_SECONDS))
    if body["auth"]:
        os.environ["RAY_AUTH_MODE"] = body["auth"]
    import ray
    from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

    if ray.is_initialized() and ray.get_runtime_context().gcs_address != body["address"]:
        ray.shutdown()
    if not ray.is_initialized():
        Config.initialize("")  # vLLM may have imported Ray before: have it read the variables again
        # Ray would take the signal over by which vLLM is told to end.
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
