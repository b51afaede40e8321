"""Live weight transfer to the vLLM engine. The code that runs inside vLLM's workers is in `extension`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instar.engines.base import LiveRoute, WeightTransfer
from instar.engines.vllm.client import VllmClient, WorkerError
from instar.engines.vllm.merge import TIED_WEIGHT, Shapes, check_shape, read_shapes
from instar.engines.vllm.weights import ServerWeights
from instar.errors import EngineError, EngineUnavailable
from instar.types import Json, Policy

PREFETCH_TIMEOUT_SECONDS = 60.0
POLL_INTERVAL_SECONDS = 0.01


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


async def prefetch_adapter(client: VllmClient, folder: str) -> None:
    """Make the workers read an adapter while they sample. If this fails, vLLM reads it when it is loaded."""
    try:
        async with asyncio.timeout(PREFETCH_TIMEOUT_SECONDS):
            while True:
                workers: list[Json] = await client.rpc("instar_read_adapter", {"path": folder})
                if all(worker.get("done") or "error" in worker for worker in workers):
                    return  # an error is raised again when the adapter is loaded
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
    except EngineUnavailable:
        raise
    except (EngineError, TimeoutError):
        return


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
