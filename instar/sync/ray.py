"""The `ray` route: weights are sent in chunks through Ray's object store to engines in the cluster.

The route is for clusters without NCCL. The trainer puts each weight into the store as a byte array. A named
actor, the mailbox, holds the references to the current chunks, so that only names and numbers are sent over
HTTP. Each engine's workers fetch a chunk from their node's store and stage it without changing the served
weights. The store contains at most two chunks: one that engines fetch and one that the trainer writes.
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

from instar.async_utils import cancel_and_wait
from instar.backends.base import Backend
from instar.engines.base import Engine, WeightTransfer
from instar.errors import ConfigError, EngineUnavailable
from instar.sync.base import RouteError
from instar.sync.live import LiveSync, PushTargets, convert_route_errors, describe_weight
from instar.sync.shared import PROBE_POLICY
from instar.types import Json, Policy

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
NAMESPACE = "instar"
CALL_TIMEOUT_SECONDS = 60.0
"""The timeout for a mailbox call. The mailbox process may have to start first."""


@dataclass(frozen=True, slots=True)
class RayChunk:
    references: list[Any]
    layout: list[tuple[str, str, list[int]]]
    """The name, dtype and shape of each weight."""


class RaySync(LiveSync):
    """Call ``start`` before any other method. The cluster is the one that this process has joined, or else
    the one at ``address``, or else the one in `RAY_ADDRESS`."""

    def __init__(
        self, backend: Backend, *, address: str | None = None, chunk_bytes: int, timeout: float
    ) -> None:
        super().__init__(backend, timeout=timeout)
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._mailbox: Any = None
        self._mailbox_address: Json = {}
        self._owns_ray_connection = False

    async def start(self) -> None:
        """Join the cluster and start the mailbox. Raises ConfigError if Ray or the cluster is unavailable."""
        await asyncio.to_thread(self._start_mailbox)

    async def check_engine(self, engine: Engine) -> None:
        """Raise EngineError if the engine's workers cannot join the cluster."""
        await engine.stage(WeightTransfer(PROBE_POLICY, "ray", {"probe": self._mailbox_address}))

    async def close(self) -> None:
        if self._mailbox is not None:
            await asyncio.to_thread(self._stop_mailbox)

    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        send_task: asyncio.Task[None] | None = None
        index = 0
        try:
            async with contextlib.aclosing(self._export_chunks()) as chunks:
                async for chunk in chunks:
                    await self._call_mailbox("put", index, chunk.references)
                    if send_task is not None:
                        await send_task
                    if not targets.healthy_engines:
                        return
                    send_task = asyncio.create_task(self._send_chunk(policy, targets, index, chunk.layout))
                    del chunk  # only the mailbox must hold the references
                    index += 1
            if send_task is not None:
                await send_task
        finally:
            if send_task is not None:
                await cancel_and_wait(send_task)
            # An error here must not hide an earlier one. The next push overwrites the remaining chunks.
            with contextlib.suppress(RouteError):
                await self._call_mailbox("clear")

    async def _send_chunk(self, policy: Policy, targets: PushTargets, index: int, layout: list[Any]) -> None:
        body = {**self._mailbox_address, "chunk": index, "layout": layout}

        async def send(engine: Engine) -> None:
            response = await engine.stage(WeightTransfer(policy, "ray", body))
            if any(worker["chunks"] != index + 1 for worker in response["workers"]):
                raise EngineUnavailable("the engine was restarted during the push")

        await targets.run("sent", send)
        await self._call_mailbox("drop", index)

    async def _export_chunks(self) -> AsyncGenerator[RayChunk, None]:
        chunk, size = RayChunk([], []), 0
        async with contextlib.aclosing(self._backend.tensors()) as tensors:
            async for name, tensor in tensors:
                if chunk.layout and size + tensor.nbytes > self._chunk_bytes:
                    yield chunk
                    chunk, size = RayChunk([], []), 0
                chunk.references.append(await _run_in_thread(_put_tensor, tensor))
                chunk.layout.append(describe_weight(name, tensor))
                size += tensor.nbytes
        if chunk.layout:
            yield chunk

    async def _call_mailbox(self, method: str, *arguments: Any) -> None:
        import ray

        def call() -> None:
            ray.get(getattr(self._mailbox, method).remote(*arguments), timeout=CALL_TIMEOUT_SECONDS)

        await _run_in_thread(call)

    # --- blocking calls to Ray -------------------------------------------------------------------

    def _start_mailbox(self) -> None:
        if find_spec("ray") is None:
            raise ConfigError(
                "Ray is not installed in the trainer's environment; run pip install 'instar[ray]'"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            self._join_cluster(ray)
        name = f"instar-weights-{secrets.token_hex(8)}"
        # The actor holds only references, so no CPU is reserved for it.
        actor_class = ray.remote(num_cpus=0)(_create_mailbox_class())
        self._mailbox = actor_class.options(name=name, namespace=NAMESPACE).remote()
        self._mailbox_address = {
            "mailbox": name,
            "namespace": NAMESPACE,
            "address": ray.get_runtime_context().gcs_address,
            # If this mode requires a token, every worker must already have it.
            "auth": os.environ.get("RAY_AUTH_MODE"),
        }
        self.description = f"ray: the object store of the cluster at {self._mailbox_address['address']}"

    def _join_cluster(self, ray: Any) -> None:
        address = self._address or os.environ.get("RAY_ADDRESS")
        if not address:
            raise ConfigError("no Ray cluster is configured; set cluster.type to ray, or set RAY_ADDRESS")
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot join the Ray cluster at {address}: {error}") from error
        self._owns_ray_connection = True

    def _stop_mailbox(self) -> None:
        import ray

        ray.kill(self._mailbox)
        self._mailbox = None
        if self._owns_ray_connection:
            ray.shutdown()


def _create_mailbox_class() -> type:
    """Return the mailbox class. It is defined in a function so that Ray pickles it by value, because the
    mailbox process may not have Instar installed."""

    class Mailbox:
        def __init__(self) -> None:
            self._chunks: dict[int, list[Any]] = {}

        def put(self, index: int, references: list[Any]) -> None:
            self._chunks[index] = references

        def get(self, index: int) -> list[Any]:
            return self._chunks[index]

        def drop(self, index: int) -> None:
            self._chunks.pop(index, None)

        def clear(self) -> None:
            self._chunks.clear()

    return Mailbox


async def _run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread and return its result. Convert Ray's errors to RouteError."""
    from ray.exceptions import RayError

    with convert_route_errors(RayError):
        return await asyncio.to_thread(function, *arguments)


def _put_tensor(tensor: Tensor) -> Any:
    """Put a tensor into the object store as a byte array, whose content Ray does not pickle."""
    import ray
    import torch

    return ray.put(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
