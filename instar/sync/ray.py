"""The route `ray`: weights pass in chunks through Ray's object store to engines on nodes of the cluster.

It is for clusters without NCCL. The trainer puts each weight into the store as an array of bytes. A named
actor, the mailbox, holds the references of the current chunks, so that only names and numbers go over HTTP.
Each engine's workers fetch a chunk from the store of their node and keep it next to their weights. At most
two chunks are in the store: the one that engines fetch and the one that is being written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from instar.backends.base import Backend
from instar.engines.base import Engine, WeightTransfer
from instar.errors import ConfigError, EngineUnavailable
from instar.sync.base import RouteError
from instar.sync.live import LiveSync, PushTargets, route_errors
from instar.sync.shared import PROBE_POLICY
from instar.types import Json, Policy

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
NAMESPACE = "instar"
CALL_SECONDS = 60.0
"""The deadline of a call to the mailbox. Its process may have to start first."""


@dataclass(frozen=True, slots=True)
class RayChunk:
    references: list[Any]
    layout: list[tuple[str, str, list[int]]]
    """(name, dtype, shape) of each weight."""


class RaySync(LiveSync):
    """The route `ray`. Call ``start`` first. ``address`` is the cluster's address; None means the cluster
    that this process has joined, or the one in `RAY_ADDRESS`."""

    def __init__(
        self, backend: Backend, *, address: str | None = None, chunk_bytes: int, deadline: float
    ) -> None:
        super().__init__(backend, deadline=deadline)
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._mailbox: Any = None
        self._names: Json = {}
        self._joined = False

    @property
    def description(self) -> str:
        return f"ray: through the object store of the Ray cluster at {self._names['address']}"

    async def start(self) -> None:
        """Join the cluster. Raises ConfigError if that fails."""
        await asyncio.to_thread(self._start_mailbox)

    async def check(self, engine: Engine) -> None:
        """Raise EngineError if the engine's workers cannot join the cluster."""
        await engine.stage(WeightTransfer(PROBE_POLICY, "ray", {"probe": self._names}))

    async def close(self) -> None:
        if self._mailbox is not None:
            await asyncio.to_thread(self._stop_mailbox)

    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        sending: asyncio.Task[None] | None = None
        index = 0
        try:
            async with contextlib.aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await self._call_mailbox("hold", index, chunk.references)
                    if sending is not None:
                        await sending
                    if not targets.engines:
                        return
                    sending = asyncio.create_task(self._send_chunk(policy, targets, index, chunk.layout))
                    del chunk
                    index += 1
            if sending is not None:
                await sending
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            # The next push overwrites the remaining chunks, and the earlier error is the one to report.
            with contextlib.suppress(RouteError):
                await self._call_mailbox("clear")

    async def _send_chunk(self, policy: Policy, targets: PushTargets, index: int, layout: list[Any]) -> None:
        body = {**self._names, "chunk": index, "layout": layout}

        async def send(engine: Engine) -> None:
            response = await engine.stage(WeightTransfer(policy, "ray", body))
            if any(worker["chunks"] != index + 1 for worker in response["workers"]):
                raise EngineUnavailable("it was restarted during the push")

        await targets.run("sent", send)
        await self._call_mailbox("drop", index)

    async def _chunks(self) -> AsyncGenerator[RayChunk, None]:
        chunk, size = RayChunk([], []), 0
        async with contextlib.aclosing(self._backend.tensors()) as tensors:
            async for name, tensor in tensors:
                if chunk.layout and size + tensor.nbytes > self._chunk_bytes:
                    yield chunk
                    chunk, size = RayChunk([], []), 0
                chunk.references.append(await _run_in_thread(_put, tensor))
                chunk.layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
                size += tensor.nbytes
        if chunk.layout:
            yield chunk

    async def _call_mailbox(self, method: str, *arguments: Any) -> None:
        import ray

        def call() -> None:
            ray.get(getattr(self._mailbox, method).remote(*arguments), timeout=CALL_SECONDS)

        await _run_in_thread(call)

    # --- blocking calls to Ray -------------------------------------------------------------------

    def _start_mailbox(self) -> None:
        if find_spec("ray") is None:
            raise ConfigError("it needs Ray in the trainer's environment: pip install 'instar[ray]'")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            self._join(ray)
        name = f"instar-weights-{secrets.token_hex(8)}"
        # One process for the complete run. It does not need a CPU.
        actor_class = ray.remote(num_cpus=0)(_mailbox_class())
        self._mailbox = actor_class.options(name=name, namespace=NAMESPACE).remote()
        self._names = {
            "mailbox": name,
            "namespace": NAMESPACE,
            "address": ray.get_runtime_context().gcs_address,
            # Tells whether the cluster requires a token. Each worker must have the token itself.
            "auth": os.environ.get("RAY_AUTH_MODE"),
        }

    def _join(self, ray: Any) -> None:
        address = self._address or os.environ.get("RAY_ADDRESS")
        if not address:
            raise ConfigError("there is no Ray cluster: set cluster.type to ray, or RAY_ADDRESS")
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"the Ray cluster at {address} cannot be joined: {error}") from error
        self._joined = True

    def _stop_mailbox(self) -> None:
        import ray

        ray.kill(self._mailbox)
        self._mailbox = None
        if self._joined:
            ray.shutdown()


def _mailbox_class() -> type:
    """Return the mailbox class. It is defined in a function, so that Ray pickles it by value: its process may
    not have Instar."""

    class Mailbox:
        def __init__(self) -> None:
            self._chunks: dict[int, list[Any]] = {}

        def hold(self, chunk: int, references: list[Any]) -> None:
            self._chunks[chunk] = references

        def take(self, chunk: int) -> list[Any]:
            return self._chunks[chunk]

        def drop(self, chunk: int) -> None:
            self._chunks.pop(chunk, None)

        def clear(self) -> None:
            self._chunks.clear()

    return Mailbox


async def _run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of ``work``, called in a thread. Ray's errors are raised as RouteError."""
    from ray.exceptions import RayError

    with route_errors(RayError):
        return await asyncio.to_thread(work, *arguments)


def _put(tensor: Tensor) -> Any:
    """Put the bytes of a tensor into the object store and return the reference. Ray copies arrays without
    pickling them."""
    import ray
    import torch

    return ray.put(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
