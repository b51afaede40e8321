"""Track the version of a vLLM server's own weights, pause sampling while they change, and receive them over
live routes. The code that runs inside vLLM's workers is in `extension`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.async_utils import run_to_completion
from instar.engines.base import LiveRoute, WeightTransfer
from instar.engines.vllm.client import VllmClient, WorkerError
from instar.engines.vllm.merge import TIED_WEIGHT, Shapes, check_shape, read_shapes
from instar.engines.vllm.reply import VllmReply
from instar.errors import EngineError, EngineUnavailable
from instar.types import Json, Policy

PAUSE_TIMEOUT_SECONDS = 120.0
RESUME_TIMEOUT_SECONDS = 30.0
NO_VERSION = -1
"""The version if the weights do not belong to any policy."""


@dataclass(frozen=True, slots=True)
class PauseTiming:
    quiet_seconds: float = 0.005
    """If no data arrives for this many seconds, all sampled tokens are assumed to have arrived."""
    settle_timeout: float = 10.0
    """Replies that still receive data after this many seconds are aborted."""
    resume_delays: tuple[float, ...] = (0.1, 0.5, 2.0)
    """The delays in seconds between attempts to resume the server."""


@dataclass
class WeightChange:
    has_started: bool = False
    version: int | None = None
    """The version of the new weights, or None until they are complete."""

    def start(self) -> None:
        """Record that the old weights are being overwritten. Until ``finish``, no policy can be served."""
        self.has_started = True

    def finish(self, version: int) -> None:
        """Record that the weights are complete. They are served as ``version`` when the pause ends."""
        self.has_started = True
        self.version = version


def require_served(version: int) -> None:
    if version == NO_VERSION:
        raise EngineUnavailable(
            "The vLLM server serves no policy, because a weight change failed; load a policy."
        )


class ServerWeights:
    """Tracks the version of one server's weights. ``replies`` contains the replies in progress."""

    def __init__(self, client: VllmClient, timing: PauseTiming | None = None) -> None:
        self.client = client
        self._timing = timing or PauseTiming()
        self.version = 0
        """The version under which the server samples now, or NO_VERSION."""
        self.replies: set[VllmReply] = set()
        self.can_store_version = False
        """True if the server can store the version of its weights, to report it with replies."""
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def pause_sampling(self) -> AsyncGenerator[WeightChange]:
        """Pause sampling while the block changes the weights. Afterwards, requests in flight recompute their
        keys and values. They continue under the new version, or under the old version if the change did not
        start. They are aborted if the change started but did not finish, or if the server cannot resume."""
        async with self._lock:
            change = WeightChange()
            settle_task: asyncio.Task[None] | None = None
            try:
                # The pause also clears the prefix cache, including the blocks of running requests.
                await self.client.post("/pause?mode=keep&clear_cache=true", timeout=PAUSE_TIMEOUT_SECONDS)
                settle_task = asyncio.create_task(self._settle())
                yield change
                if change.version is not None:
                    await settle_task
                    for reply in self.replies:
                        reply.mark_version(self.version)
                    self.version = change.version
                    await self.store_version(change.version)
            finally:
                if settle_task is not None:
                    settle_task.cancel()
                if change.has_started and change.version != self.version:
                    self._invalidate()
                else:
                    # Resume even if the caller was cancelled or the response to the pause was lost.
                    await run_to_completion(self._resume())

    async def _resume(self) -> None:
        for delay in (*self._timing.resume_delays, None):
            try:
                await self.client.post("/resume", timeout=RESUME_TIMEOUT_SECONDS)
                return
            except EngineError:
                if delay is None:
                    self._invalidate()
                    raise
            await asyncio.sleep(delay)

    def _count_received_bytes(self) -> int:
        return sum(reply.received_bytes for reply in self.replies)

    async def _settle(self) -> None:
        """Wait until every token that was sampled before the pause has arrived. Replies that still receive
        data are aborted, because the versions of their tokens would be unknown."""
        previous = self._count_received_bytes()
        try:
            async with asyncio.timeout(self._timing.settle_timeout):
                while True:
                    await asyncio.sleep(self._timing.quiet_seconds)
                    if (current := self._count_received_bytes()) == previous:
                        return
                    previous = current
        except TimeoutError:
            self._abort_replies()

    async def store_version(self, version: int) -> None:
        if self.can_store_version:
            with contextlib.suppress(EngineError):  # sampling does not depend on the stored version
                await self.client.post("/update_weight_version", {"new_version": str(version)})

    def _invalidate(self) -> None:
        self.version = NO_VERSION
        self._abort_replies()

    def _abort_replies(self) -> None:
        for reply in [*self.replies]:
            reply.abort()


async def find_routes(client: VllmClient) -> tuple[LiveRoute, ...]:
    """Return the live routes that a server supports. Without our worker extension, there are none."""
    try:
        workers: list[Json] = await client.rpc("instar_describe")
    except EngineError:
        return ()
    routes: list[LiveRoute] = ["ipc"]
    if all(worker["nccl"] and worker["gpu"] for worker in workers):
        routes.append("nccl")
    if all(worker["ray"] for worker in workers):
        routes.append("ray")
    return tuple(routes)


class TransferReceiver:
    """Stages and commits weights on one server. Their shapes must match the model in the folder ``base``."""

    def __init__(self, weights: ServerWeights, base: Path) -> None:
        self._weights = weights
        self._client = weights.client
        self._base = base
        self._shapes: Shapes | None = None
        self._missing: set[str] = set()
        """The names of the weights of policy ``_key`` that have not arrived yet."""
        self._key = ""
        self._nccl_update: Json | None = None
        """The description of the weights that will arrive over NCCL during the next commit."""

    async def stage(self, transfer: WeightTransfer) -> Json:
        if transfer.route == "nccl":
            return await self._stage_nccl(transfer.body)
        self._nccl_update = None
        key = _policy_key(transfer.policy)
        if "layout" in transfer.body:
            await self._check_layout(key, transfer.body["layout"], is_first=not transfer.body.get("chunk"))
        elif "buffer" in transfer.body:
            self._missing = set()  # the buffer contains all weights, and its layout has already been checked
        results = await self._client.call_workers("instar_stage", {**transfer.body, "key": key})
        return results[0] | {"workers": results}

    async def _check_layout(self, key: str, layout: Sequence[Sequence[Any]], *, is_first: bool) -> None:
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(read_shapes, self._base)
        if is_first or key != self._key:
            self._key, self._missing = key, self._shapes.keys() - {TIED_WEIGHT}
        for name, _, shape, *_ in layout:
            check_shape(name, tuple(shape), self._shapes.get(name))
            self._missing.discard(name)

    async def commit(self, policy: Policy) -> None:
        if self._missing:
            raise EngineError(f"{len(self._missing)} weights did not arrive, such as {min(self._missing)}.")
        async with self._weights.pause_sampling() as change:
            previous_version = self._weights.version
            change.start()
            if self._nccl_update is not None:
                update, self._nccl_update = self._nccl_update, None
                await self._client.post("/start_weight_update")
                await self._client.post("/update_weights", {"update_info": update})
                await self._client.post("/finish_weight_update")
            else:
                try:
                    await self._client.call_workers("instar_commit", {"key": _policy_key(policy)})
                except WorkerError as error:
                    if not error.weights_changed:
                        change.finish(previous_version)
                    raise
            change.finish(policy.version)

    async def _stage_nccl(self, body: Json) -> Json:
        """Connect the workers to the trainer (``init``) or store the description of the weights (``update``),
        and return the number of workers. The weights are sent during the commit, because vLLM loads them
        while it receives them."""
        if "init" in body:
            await self._client.post("/init_weight_transfer_engine", {"init_info": body["init"]})
        if "update" in body:
            self._nccl_update = body["update"]
        return {"world_size": (await self._client.get("/get_world_size"))["world_size"]}


def _policy_key(policy: Policy) -> str:
    return f"{policy.policy_id}:{policy.version}"
