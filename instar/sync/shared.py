"""The route `ipc`: engines on the same machine map a buffer of the trainer that contains the weights.

On a GPU the buffer is in its memory, else in main memory. It is created at the first push and opened once by
each engine. A push then writes the weights, notifies each engine, and the engine copies them. An engine that
has not responded may copy late: its buffer is not written again, and later pushes use a new one.
"""

from __future__ import annotations

import base64
import math
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from instar.backends.base import Backend
from instar.engines.base import Engine, WeightTransfer
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.sync.live import LiveSync, PushTargets, route_errors
from instar.types import Artifact, Json, Policy

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256
"""Every weight begins at a multiple of this number of bytes."""
PROBE_POLICY = Policy("probe", 0, Artifact("live"))


class SharedSync(LiveSync):
    def __init__(
        self,
        backend: Backend,
        *,
        device: str,
        deadline: float,
        create_buffer: Callable[[list[WeightPlacement], str], SharedBuffer] | None = None,
    ) -> None:
        super().__init__(backend, deadline=deadline)
        self._create_buffer = create_buffer or SharedBuffer
        self._device = device
        self._buffer: SharedBuffer | None = None
        self._copying: set[Engine] = set()
        """The engines that may still copy from the buffer."""
        self._old: SharedBuffer | None = None
        """The previous buffer, until the engines have opened the current one."""

    @property
    def description(self) -> str:
        where = "the GPU's memory" if self._device == "cuda" else "the machine's memory"
        return f"ipc: the engines copy the weights from a buffer of the trainer, in {where}"

    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        buffer = await self._free_buffer()
        await self._fill(buffer)
        await targets.run("sent", lambda engine: _stage_buffer(engine, policy, buffer))
        if self._old is not None:
            self._old.close()
            self._old = None

    async def _free_buffer(self) -> SharedBuffer:
        """Return a buffer that no engine is copying from."""
        before = self._buffer
        if before is not None and not self._copying:
            return before
        layout = await self._layout() if before is None else before.layout
        with route_errors():
            self._buffer = self._create_buffer(layout, self._device)
        self._old = before
        self._copying.clear()
        return self._buffer

    async def _commit(self, policy: Policy, targets: PushTargets) -> None:
        self._copying.update(targets.engines)

        async def commit(engine: Engine) -> None:
            try:
                await engine.commit(policy)
            except EngineUnavailable:
                raise
            except EngineError:
                self._copying.discard(engine)  # it has responded, so it no longer copies
                raise
            self._copying.discard(engine)

        await targets.commit(commit)

    async def _layout(self) -> list[WeightPlacement]:
        layout: list[WeightPlacement] = []
        end = 0
        async for name, tensor in self._backend.tensors():
            layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return layout

    async def _fill(self, buffer: SharedBuffer) -> None:
        left = dict(buffer.views)
        async for name, tensor in self._backend.tensors():
            target = left.pop(name, None)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise SyncError(
                    f"the backend's {name} has changed its shape or dtype since the buffer was created"
                )
            with route_errors():
                target.copy_(tensor)
        if left:
            raise SyncError(f"the backend provided {len(left)} weights fewer than before")
        with route_errors():
            buffer.synchronize()

    async def close(self) -> None:
        for buffer in (self._buffer, self._old):
            if buffer is not None:
                buffer.close()
        self._buffer = self._old = None


WeightPlacement = tuple[str, str, list[int], int]
"""The name, dtype, shape and first byte of a weight."""


class SharedBuffer:
    def __init__(self, layout: list[WeightPlacement], device: str) -> None:
        import torch

        self.layout = layout
        self.name = secrets.token_hex(8)
        self._descriptor: int | None = None
        name, dtype, shape, start = layout[-1]
        size = start + _nbytes(dtype, shape)
        if device == "cuda":
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cuda")
        else:
            self._descriptor = os.memfd_create(f"instar-{self.name}")
            os.truncate(self._descriptor, size)
            self._bytes = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)
        self.handle: Json = {"kind": "memory", "path": self._path, "size": size}
        if device == "cuda":
            self.handle = self._cuda_handle() | {"size": size}
        self.views: dict[str, Tensor] = {}
        for name, dtype, shape, start in layout:
            part = self._bytes[start : start + _nbytes(dtype, shape)]
            self.views[name] = part.view(getattr(torch, dtype)).view(shape)

    @property
    def _path(self) -> str:
        """Return the path that other processes of this user can open. It disappears when this process exits,
        for whatever reason."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def _cuda_handle(self) -> Json:
        """Return, as JSON, the handle that torch's multiprocessing would pickle."""
        from torch.multiprocessing.reductions import reduce_tensor

        _, parts = reduce_tensor(self._bytes)
        # The first seven are the class, size, stride, offset, storage class, dtype and device number.
        return {"kind": "cuda", "gpu": current_gpu_uuid(), "parts": [_to_json(part) for part in parts[7:]]}

    def synchronize(self) -> None:
        """Wait until everything that was written is visible to other processes."""
        if self._bytes.is_cuda:
            import torch

            torch.cuda.synchronize(self._bytes.device)

    def close(self) -> None:
        self.views.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def probe_shared_memory(engine: Engine) -> Json:
    """Return a dict with ``shared``, true if the engine can map this process's memory, and ``gpus``, the GPUs
    that the engine uses."""
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


def current_gpu_uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


async def _stage_buffer(engine: Engine, policy: Policy, buffer: SharedBuffer) -> None:
    """Announce the buffer to an engine. The layout is sent only if the engine has not opened the buffer
    yet."""
    body: Json = {"buffer": buffer.name}
    response = await engine.stage(WeightTransfer(policy, "ipc", body))
    if not all(worker["known"] for worker in response["workers"]):
        await engine.stage(
            WeightTransfer(policy, "ipc", {**body, "handle": buffer.handle, "layout": buffer.layout})
        )


def _nbytes(dtype: str, shape: list[int]) -> int:
    import torch

    return getattr(torch, dtype).itemsize * math.prod(shape)


def _to_json(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
