"""Receives new weights in vLLM's workers while the old ones are still served, and then replaces the old ones.
Also reads adapters in the workers while they continue to sample.

Servers are started with ``--worker-extension-cls instar.engines.vllm.extension.WeightReceiver``. The methods
are called by name (`/collective_rpc`), most of them with JSON text, and return a dict. On failure, the dict
has an ``error`` message, and ``weights_changed`` is true if the served weights may have changed. Data that
arrives over HTTP is never unpickled.
"""

# vLLM runs in its own environment, with torch and, for the `ray` sync route, Ray.
# pyright: reportMissingImports=false
from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

RAY_GET_TIMEOUT_SECONDS = 60.0
RAY_RECONNECT_TIMEOUT_SECONDS = 10**6
"""After this long without its cluster, Ray ends the process. Its default of one minute would end vLLM."""
PLAIN_QUANT_METHODS = frozenset({"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""Layers with these ``quant_method`` classes store parameters in the same layout as the model's files."""
SWITCH_INTERVAL_SECONDS = 0.0002
"""The thread that reads adapters yields after this many seconds. Python's default would delay tokens."""


class WeightReceiver:
    """A mixin for vLLM's worker class. Its method and attribute names must be unique in that class."""

    device: torch.device
    model_runner: Any
    model_config: Any

    def instar_describe(self) -> dict[str, Any]:
        """Return the worker properties that determine which weight transfer routes it supports."""
        has_nccl = type(getattr(self, "weight_transfer_engine", None)).__name__.startswith("NCCL")
        return {"gpu": _get_gpu_uuid(self.device), "ray": find_spec("ray") is not None, "nccl": has_nccl}

    def instar_stage(self, text: str) -> dict[str, Any]:
        """Receive weights of a policy and drop the staged weights of other policies, or handle a probe."""
        body: dict[str, Any] = json.loads(text)
        try:
            return self._instar_staged.receive(body, self.device)
        except Exception as error:  # noqa: BLE001 - every error is returned to the caller
            return {"error": f"{type(error).__name__}: {error}"}

    def instar_commit(self, text: str) -> dict[str, Any]:
        """Replace the served weights with the staged weights. The server must be paused."""
        staged, key = self._instar_staged, json.loads(text)["key"]
        if staged.key != key or not staged.weights:
            return {"error": f"No weights are staged for the policy {key}.", "weights_changed": False}
        try:
            staged.load_into(self.model_runner.get_model(), self.model_config, self.device)
        except Exception as error:  # noqa: BLE001 - every error is returned to the caller
            return {"error": f"{type(error).__name__}: {error}", "weights_changed": True}
        finally:
            staged.clear()
        return {}

    def instar_reload(self, text: str) -> dict[str, Any]:
        """Replace the served weights with the weights in a folder. The server must be paused."""
        model, weights = self.model_runner.get_model(), read_weights(Path(json.loads(text)["path"]))
        try:
            if self.device.type == "cuda" and has_file_layout(model):
                load_in_place(model, weights, None)
            else:
                load_through_layers(model, self.model_config, weights)
        except Exception as error:  # noqa: BLE001 - every error is returned to the caller
            return {"error": f"{type(error).__name__}: {error}", "weights_changed": True}
        return {}

    def instar_read_adapter(self, path: str) -> dict[str, Any]:
        """Read the adapter in the background. Call again until ``done`` is true or ``error`` is set."""
        if "instar_prefetch" not in self.__dict__:
            self.__dict__["instar_prefetch"] = _AdapterReader(self.model_runner.lora_manager, self.device)
        return self.__dict__["instar_prefetch"].read(path)

    @property
    def _instar_staged(self) -> StagedWeights:
        if "instar_staged" not in self.__dict__:
            self.__dict__["instar_staged"] = StagedWeights()
        return self.__dict__["instar_staged"]


@dataclass
class MappedBuffer:
    name: str
    buffer: Tensor
    weights: list[tuple[str, Tensor]]
    copy_plan: CopyPlan | None = None


@dataclass
class StagedWeights:
    key: str = ""
    weights: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])
    chunk_indices: set[int] = field(default_factory=set[int])
    mapped_buffer: MappedBuffer | None = None
    fetch_chunk: Callable[[dict[str, Any]], list[tuple[str, Tensor]]] = field(
        default_factory=lambda: _fetch_ray_chunk
    )

    def receive(self, body: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if "probe" in body:
            return _handle_probe(body["probe"], device)
        if body["key"] != self.key or body.get("chunk") == 0:
            self.clear()
            self.key = body["key"]
        if "buffer" in body:
            return self._map_buffer(body, device)
        if body["chunk"] not in self.chunk_indices:
            self.weights += self.fetch_chunk(body)
            self.chunk_indices.add(body["chunk"])
        return {"chunks": len(self.chunk_indices)}

    def _map_buffer(self, body: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if self.mapped_buffer is None or self.mapped_buffer.name != body["buffer"]:
            if "handle" not in body:
                return {"known": False}
            self.mapped_buffer = None
            buffer = open_buffer(body["handle"], device)
            weights = create_buffer_views(buffer, body["layout"])
            self.mapped_buffer = MappedBuffer(body["buffer"], buffer, weights)
        self.weights = self.mapped_buffer.weights
        return {"known": True}

    def load_into(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        mapped = (
            self.mapped_buffer if self.mapped_buffer and self.mapped_buffer.weights is self.weights else None
        )
        if mapped and mapped.copy_plan:
            mapped.copy_plan.run()
        elif device.type == "cuda" and has_file_layout(model):
            plan = load_in_place(model, self.weights, mapped.buffer if mapped else None)
            if mapped:
                mapped.copy_plan = plan
        else:
            load_through_layers(model, model_config, self.weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def clear(self) -> None:
        """Drop the weights. A mapped buffer stays open for the next policy."""
        self.key, self.weights = "", []
        self.chunk_indices.clear()


@dataclass(frozen=True)
class CopyPlan:
    targets: list[Tensor]
    sources: list[Tensor]

    @torch.no_grad()
    def run(self) -> None:
        torch._foreach_copy_(self.targets, self.sources)  # pyright: ignore


class _CopyRecorder(TorchDispatchMode):
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
    """Load the weights. Return a plan that repeats the load from ``buffer``, if there is one. Return None if
    copies cannot repeat it: a weight is converted, split among workers, or not copied to a parameter."""
    parameter_names = {name for name, _ in model.named_parameters()}
    with torch.no_grad(), _CopyRecorder() as recorder:
        loaded: set[str] | None = model.load_weights(iter(weights))  # pyright: ignore[reportCallIssue]
    _check_complete(parameter_names, loaded)
    if buffer is None:
        return None
    parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    buffer_storage = buffer.untyped_storage().data_ptr()
    is_plain_copy = all(
        source.untyped_storage().data_ptr() == buffer_storage
        and target.untyped_storage().data_ptr() in parameter_storages
        and target.dtype == source.dtype
        for target, source in recorder.copies
    )
    copied_bytes = sum(source.nbytes for _, source in recorder.copies)
    if not is_plain_copy or copied_bytes != sum(tensor.nbytes for _, tensor in weights):
        return None
    return CopyPlan([target for target, _ in recorder.copies], [source for _, source in recorder.copies])


def load_through_layers(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load the weights with vLLM's own code, which converts them for quantized or CPU layers."""
    from vllm.model_executor.model_loader import reload

    parameter_names = {name for name, _ in model.named_parameters()}
    reload.initialize_layerwise_reload(model)
    try:
        loaded: set[str] | None = model.load_weights(iter(weights))  # pyright: ignore[reportCallIssue]
        reload.finalize_layerwise_reload(model, model_config)
    except BaseException:  # every error, so that the next load can succeed
        _reset_layers(model)
        raise
    _check_complete(parameter_names, loaded)
    # On a CPU, vLLM does not update the packed copy of an output layer that is tied to the embedding.
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and type(layer.quant_method).__name__ == "UnquantizedEmbeddingMethod":
            cast(Any, layer.quant_method).process_weights_after_loading(layer)


def _reset_layers(model: nn.Module) -> None:
    """Drop partially loaded layers. Otherwise the next load would wait for the rest of their weights."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()


def has_file_layout(model: nn.Module) -> bool:
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    return methods <= PLAIN_QUANT_METHODS


def _check_complete(parameter_names: set[str], loaded: set[str] | None) -> None:
    if loaded is not None and (missing := sorted(parameter_names - loaded)):
        raise ValueError(f"{len(missing)} parameters are missing, for example {missing[0]}")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with cast(Any, safe_open(path, "pt")) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def open_buffer(handle: dict[str, Any], device: torch.device) -> Tensor:
    """Map the trainer's buffer in GPU memory or main memory, and return it as a tensor of bytes."""
    if handle["kind"] == "memory":
        return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)
    if handle["gpu"] != _get_gpu_uuid(device):
        raise ValueError(
            f"The trainer's buffer is on GPU {handle['gpu']}, but this worker uses {_get_gpu_uuid(device)}."
        )
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle["parts"]]
    size = (handle["size"],)
    return rebuild_cuda_tensor(
        Tensor, size, (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index or 0, *parts
    )


def create_buffer_views(buffer: Tensor, layout: Sequence[Sequence[Any]]) -> list[tuple[str, Tensor]]:
    """Return the tensors in a buffer. A layout entry is (name, dtype, shape, offset in bytes)."""
    views: list[tuple[str, Tensor]] = []
    for name, dtype_name, shape, start in layout:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * int(np.prod(shape))
        views.append((name, buffer[start:end].view(dtype).view(shape)))
    return views


def _handle_probe(probe: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Check that a route works. For `ipc`, return the content of the trainer's file, which the trainer then
    compares, and this worker's GPU. For `ray`, connect to the mailbox."""
    if "path" in probe:
        content = torch.from_file(probe["path"], shared=True, size=probe["size"], dtype=torch.uint8)
        return {"content": bytes(content.tolist()).hex(), "gpu": _get_gpu_uuid(device)}
    _connect_mailbox(probe)
    return {}


def _fetch_ray_chunk(body: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Fetch the weights of one chunk. They are copied, so that the object store can delete the chunk."""
    import ray

    references = ray.get(_connect_mailbox(body).get.remote(body["chunk"]), timeout=RAY_GET_TIMEOUT_SECONDS)
    arrays = ray.get(references, timeout=RAY_GET_TIMEOUT_SECONDS)
    weights: list[tuple[str, Tensor]] = []
    for (name, dtype_name, shape), array in zip(body["layout"], arrays, strict=True):
        tensor = torch.from_numpy(np.array(array)).view(getattr(torch, dtype_name)).view(shape)
        weights.append((name, tensor))
    return weights


def _connect_mailbox(body: dict[str, Any]) -> Any:
    """Connect to the trainer's Ray cluster if necessary, and return the trainer's mailbox actor."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RAY_RECONNECT_TIMEOUT_SECONDS))
    if body["auth"]:
        os.environ["RAY_AUTH_MODE"] = body["auth"]
    import ray
    from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

    if ray.is_initialized() and ray.get_runtime_context().gcs_address != body["address"]:
        ray.shutdown()
    if not ray.is_initialized():
        Config.initialize("")  # read the variables again, because vLLM may have already imported Ray
        # Ray replaces vLLM's SIGTERM handler, so it is restored afterwards.
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=body["address"], log_to_driver=False, configure_logging=False)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return ray.get_actor(body["mailbox"], namespace=body["namespace"])


def _get_gpu_uuid(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device.index or 0).uuid)


class _AdapterReader:
    """Reads an adapter in a thread before vLLM loads it, so that only the copy to the GPU is left between two
    steps. Otherwise, every stream waits until some 400 small tensors are read, cast, packed and copied."""

    def __init__(self, manager: Any, device: torch.device) -> None:
        self._device = device
        self._manager = manager
        self._load_adapter = manager._load_adapter
        self._path = ""
        self._adapter: Any = None
        self._error = ""
        self._thread: threading.Thread | None = None
        # vLLM's manager reads adapters only through this method.
        manager._load_adapter = self._take_adapter

    def read(self, path: str) -> dict[str, Any]:
        if path != self._path:
            if self._thread is not None:
                self._thread.join()
            self._path, self._adapter, self._error = path, None, ""
            self._thread = threading.Thread(target=self._read_in_thread, args=(path,), daemon=True)
            self._thread.start()
        if self._error:
            self._path = ""
            return {"error": self._error}
        return {"done": self._adapter is not None}

    def _read_in_thread(self, path: str) -> None:
        from vllm.lora.request import LoRARequest

        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with _short_switch_interval():
                adapter = self._load_adapter(LoRARequest("prefetch", 1, path))
                # vLLM calls this again when it adds the adapter, but by then there is nothing left to do.
                self._manager._adapter_manager._create_merged_loras_inplace(adapter)
            self._adapter = adapter
        except Exception as error:  # noqa: BLE001 - every error is returned to the caller
            self._error = f"{type(error).__name__}: {error}"

    def _take_adapter(self, request: Any) -> Any:
        if request.lora_path != self._path or self._adapter is None:
            return self._load_adapter(request)
        adapter, self._path, self._adapter = self._adapter, "", None
        return adapter.clone(request.lora_int_id)


@contextmanager
def _short_switch_interval() -> Generator[None]:
    previous = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(previous)
