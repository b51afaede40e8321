"""vLLM's end of the routes that bring weights without files. Inside its workers is `extension`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from instar.engines.base import LiveRoute, WeightTransfer
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.merge import Shapes, read_shapes
from instar.engines.vllm.weights import ServerWeights
from instar.errors import EngineError, EngineUnavailable
from instar.types import Json, Policy

READ_SECONDS = 60.0
LOOK_EVERY = 0.01
TIED = "lm_head.weight"
"""Some files hold it although it is the input's."""


async def find_routes(client: VllmClient) -> tuple[LiveRoute, ...]:
    """The ways on which this server takes weights; none where it was started without our worker extension."""
    try:
        ends: list[Json] = await client.rpc("instar_ends")
    except EngineError:
        return ()
    routes: list[LiveRoute] = ["ipc"]
    if all(end["nccl"] and end["gpu"] for end in ends):
        routes.append("nccl")
    if all(end["ray"] for end in ends):
        routes.append("ray")
    return tuple(routes)


async def prefetch_adapter(client: VllmClient, folder: str) -> None:
    """Have the workers read an adapter while they go on sampling. A server without our worker extension reads
    it when it is told to load it, and its streams wait."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            while True:
                told: list[Json] = await client.rpc("instar_read_adapter", {"path": folder})
                if all(worker.get("done") or "error" in worker for worker in told):
                    return  # what is wrong with the adapter, loading it tells
                await asyncio.sleep(LOOK_EVERY)
    except EngineUnavailable:
        raise
    except (EngineError, TimeoutError):
        return


class TransferReceiver:
    """Stages and commits on one server. Every worker of it takes in all the weights."""

    def __init__(self, weights: ServerWeights, base: Path) -> None:
        """``base``: the model's folder. What is not of its shapes is refused before anything is touched."""
        self._weights = weights
        self._client = weights.client
        self._base = base
        self._shapes: Shapes | None = None
        self._missing: set[str] = set()
        """Names of weights that have not come yet for the policy ``_key``."""
        self._key = ""
        self._update: Json | None = None
        """What comes over NCCL at the next commit."""

    async def stage(self, transfer: WeightTransfer) -> Json:
        if transfer.route == "nccl":
            return await self._agree(transfer.body)
        self._update = None
        key = _key(transfer.policy)
        if "layout" in transfer.body:
            await self._check(key, transfer.body["layout"], first=not transfer.body.get("chunk"))
        elif "buffer" in transfer.body:
            self._missing = set()  # it was checked when it was opened, and holds all
        answers = await self._tell("instar_stage", {**transfer.body, "key": key})
        return answers[0] | {"workers": answers}

    async def _check(self, key: str, layout: Sequence[Sequence[Any]], *, first: bool) -> None:
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(read_shapes, self._base)
        if first or key != self._key:
            self._key, self._missing = key, self._shapes.keys() - {TIED}
        for name, _, shape, *_ in layout:
            if self._shapes.get(name) != tuple(shape):
                raise EngineError(f"the weights are of another architecture: {name} is {shape} there")
            self._missing.discard(name)

    async def commit(self, policy: Policy) -> None:
        if self._missing:
            raise EngineError(f"{len(self._missing)} weights did not come, {min(self._missing)} for one")
        async with self._weights.paused() as change:
            before = self._weights.version
            change.start()
            if self._update is not None:
                update, self._update = self._update, None
                await self._client.post("/start_weight_update")
                await self._client.post("/update_weights", {"update_info": update})
                await self._client.post("/finish_weight_update")
            else:
                try:
                    await self._tell("instar_commit", {"key": _key(policy)})
                except _WeightsUnchangedError:
                    change.finish(before)
                    raise
            change.finish(policy.version)

    async def _agree(self, body: Json) -> Json:
        """On a group with the trainer, or on what comes through it: vLLM loads while it receives."""
        if "init" in body:
            await self._client.post("/init_weight_transfer_engine", {"init_info": body["init"]})
        if "update" in body:
            self._update = body["update"]
        return {"world_size": (await self._client.get("/get_world_size"))["world_size"]}

    async def _tell(self, method: str, body: Json) -> list[Json]:
        """Raises EngineError with what the first worker says that fails."""
        text = msgspec.json.encode(body).decode()
        answers: list[dict[str, Any]] = await self._client.rpc(method, {"text": text})
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            untouched = all("error" in answer and not answer.get("touched") for answer in answers)
            raise (_WeightsUnchangedError if untouched else EngineError)(
                f"vLLM's worker: {failed[0]['error']}"
            )
        return answers


class _WeightsUnchangedError(EngineError):
    """It failed, and what is served is whole."""


def _key(policy: Policy) -> str:
    return f"{policy.policy_id}:{policy.version}"
