"""The `ipc` route: engines on the same machine map the trainer's weight buffer.

The buffer is in GPU memory, or in main memory if the trainer runs on a CPU. It is created at the first push,
and each engine opens it once. A push writes the weights to the buffer and notifies each engine, which copies
the weights. An engine that does not respond may still be copying, so the trainer never writes to this buffer
again and uses a new buffer for later pushes.
"""

from __future__ import annotations

import base64
import math
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from instar.backends.base import Backend
from instar.engines.base import Engine, WeightTransfer
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.sync.live import LiveSync, PushTargets, convert_route_errors, describe_weight
from instar.types import Artifact, Json, Policy

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_ALIGNMENT_BYTES = 256
PROBE_POLICY = Policy("probe", 0, Artifact("live"))


class SharedSync(LiveSync):
    def __init__(
        self,
        backend: Backend,
        *,
        device: str,
        timeout: float,
        create_buffer: Callable[[list[WeightPlacement], str], SharedBuffer] | None = None,
    ) -> None:
        super().__init__(backend, timeout=timeout)
        self._create_buffer = create_buffer or SharedBuffer
        self._device = device
        self._buffer: SharedBuffer | None = None
        self._copying_engines: set[Engine] = set()
        """The engines that may still be copying from the buffer."""
        self._previous_buffer: SharedBuffer | None = None
        """Closed when all engines have been notified of the current buffer."""
        memory = "GPU memory" if device == "cuda" else "main memory"
        self.description = f"ipc: the engines copy the weights from the trainer's buffer in {memory}"

    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        buffer = await self._prepare_buffer()
        await self._fill(buffer)
        await targets.run("sent", lambda engine: _stage_buffer(engine, policy, buffer))
        if self._previous_buffer is not None:
            self._previous_buffer.close()
            self._previous_buffer = None

    async def _prepare_buffer(self) -> SharedBuffer:
        """Return a buffer that no engine is copying from. Create it if necessary."""
        previous = self._buffer
        if previous is not None and not self._copying_engines:
            return previous
        layout = await self._read_layout() if previous is None else previous.layout
        with convert_route_errors():
            self._buffer = self._create_buffer(layout, self._device)
        self._previous_buffer = previous
        self._copying_engines.clear()
        return self._buffer

    async def _commit(self, policy: Policy, targets: PushTargets) -> None:
        self._copying_engines.update(targets.healthy_engines)

        async def commit(engine: Engine) -> None:
            try:
                await engine.commit(policy)
            except EngineError as error:
                if not isinstance(error, EngineUnavailable):
                    self._copying_engines.discard(engine)  # it has responded, so it is no longer copying
                raise
            self._copying_engines.discard(engine)

        await targets.commit(commit)

    async def _read_layout(self) -> list[WeightPlacement]:
        layout: list[WeightPlacement] = []
        offset = 0
        async for name, tensor in self._backend.tensors():
            layout.append((*describe_weight(name, tensor), offset))
            offset += -(-tensor.nbytes // WEIGHT_ALIGNMENT_BYTES) * WEIGHT_ALIGNMENT_BYTES
        return layout

    async def _fill(self, buffer: SharedBuffer) -> None:
        missing = dict(buffer.views)
        async for name, tensor in self._backend.tensors():
            target = missing.pop(name, None)
            if target is None:
                raise SyncError(f"weight {name} was not part of the first push")
            if target.shape != tensor.shape or target.dtype != tensor.dtype:
                now, before = (f"{weight.dtype} {tuple(weight.shape)}" for weight in (tensor, target))
                raise SyncError(f"weight {name} is {now}, but was {before} at the first push")
            with convert_route_errors():
                target.copy_(tensor)
        if missing:
            raise SyncError(f"{len(missing)} weights of the first push are missing, such as {min(missing)}")
        with convert_route_errors():
            buffer.synchronize()

    async def close(self) -> None:
        for buffer in (self._buffer, self._previous_buffer):
            if buffer is not None:
                buffer.close()
        self._buffer = self._previous_buffer = None


WeightPlacement = tuple[str, str, list[int], int]
"""The name, dtype, shape and byte offset of a weight."""


class SharedBuffer:
    def __init__(self, layout: list[WeightPlacement], device: str) -> None:
        import torch

        self.layout = layout
        self.name = secrets.token_hex(8)
        self._descriptor: int | None = None
        _, dtype, shape, start = layout[-1]
        size = start + _count_bytes(dtype, shape)
        if device == "cuda":
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cuda")
        else:
            self._descriptor = os.memfd_create(f"instar-{self.name}")
            os.truncate(self._descriptor, size)
            self._bytes = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)
        self.handle: Json = {"kind": "memory", "path": self._path, "size": size}
        if device == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            # The engine knows the first seven values, which describe the tensor and its device.
            parts = [
                {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
                for value in reduce_tensor(self._bytes)[1][7:]
            ]
            self.handle = {"kind": "cuda", "gpu": get_gpu_uuid(), "parts": parts, "size": size}
        self.views: dict[str, Tensor] = {}
        for name, dtype, shape, start in layout:
            part = self._bytes[start : start + _count_bytes(dtype, shape)]
            self.views[name] = part.view(getattr(torch, dtype)).view(shape)

    @property
    def _path(self) -> str:
        # Other processes of this user can open the path. It disappears when this process exits.
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def synchronize(self) -> None:
        """Wait until all written weights are visible to other processes."""
        if self._bytes.is_cuda:
            import torch

            torch.cuda.synchronize(self._bytes.device)

    def close(self) -> None:
        self.views.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def probe_shared_memory(engine: Engine) -> Json:
    """Check what the engine shares with this process. In the result, ``shared`` is true if the engine can map
    this process's memory, and ``gpus`` contains the UUIDs of the engine's GPUs."""
    secret = secrets.token_bytes(16)
    descriptor = os.memfd_create("instar-probe")
    try:
        os.write(descriptor, secret)
        probe = {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "size": len(secret)}
        response = await engine.stage(WeightTransfer(PROBE_POLICY, "ipc", {"probe": probe}))
    finally:
        os.close(descriptor)
    workers: list[Json] = response["workers"]
    return {
        "shared": all(worker["content"] == secret.hex() for worker in workers),
        "gpus": sorted({str(worker["gpu"]) for worker in workers if worker["gpu"]}),
    }


def get_gpu_uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


async def _stage_buffer(engine: Engine, policy: Policy, buffer: SharedBuffer) -> None:
    """Announce the buffer to an engine, with its handle and layout if a worker has not opened it yet."""
    body: Json = {"buffer": buffer.name}
    response = await engine.stage(WeightTransfer(policy, "ipc", body))
    if not all(worker["known"] for worker in response["workers"]):
        await engine.stage(
            WeightTransfer(policy, "ipc", {**body, "handle": buffer.handle, "layout": buffer.layout})
        )


def _count_bytes(dtype: str, shape: list[int]) -> int:
    import torch

    return getattr(torch, dtype).itemsize * math.prod(shape)
