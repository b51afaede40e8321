"""The route `nccl`: vLLM's own weight-transfer API, over NCCL, between the GPUs of trainer and engines.

The trainer is rank 0 of a group with all workers of all engines, and broadcasts each weight to them once.
vLLM loads while it receives, so there is no phase of taking in: an engine that fails in the middle serves
nothing until it is given another policy, and says so. A group stands for as long as its engines do; when one
is replaced, all meet again. A broadcast that somebody does not take part in never ends: leaving the group
breaks it off.

Seen working with vLLM 0.26, with trainer and engine as two members on one GPU; not yet with several GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from instar.backends.base import Backend
from instar.engines.base import Engine, WeightTransfer
from instar.errors import ConfigError, SyncError
from instar.sync.live import LiveSync, PushTargets, route_errors
from instar.types import Json, Policy


def require_vllm() -> None:
    """vLLM's communicator is what its workers meet."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ConfigError(
            "sync.route: 'nccl' needs vLLM in the trainer's environment (backend.python) too, for its "
            "communicator"
        )


class NcclSync(LiveSync):
    def __init__(self, backend: Backend, *, host: str, deadline: float) -> None:
        """``host``: where the engines' workers find the trainer."""
        super().__init__(backend, deadline=deadline)
        self._host = host
        self._group: Any = None
        self._members: list[Engine] = []
        self._update: Json | None = None

    @property
    def description(self) -> str:
        return "nccl: broadcast from the trainer's GPU to the engines'"

    async def _stage(self, policy: Policy, fleet: PushTargets) -> None:
        if self._update is None:
            self._update = await self._metadata()
        if self._group is None or self._members != fleet.engines:
            await self._meet(policy, fleet)
        body: Json = {"update": self._update}
        await fleet.run("announced", lambda engine: engine.stage(WeightTransfer(policy, "nccl", body)))
        if fleet.engines != self._members:
            # Who is not there would be waited for: those that are meet again at the next try.
            await self._leave()
            fleet.fail_remaining("broadcast", SyncError("another engine of its group is gone"))

    async def _commit(self, policy: Policy, fleet: PushTargets) -> None:
        broken = asyncio.Event()

        async def commit(engine: Engine) -> None:
            try:
                await engine.commit(policy)
            except BaseException:
                broken.set()
                raise

        sending = asyncio.create_task(self._send())
        serving = asyncio.create_task(fleet.commit(commit))
        breaking = asyncio.create_task(broken.wait())
        try:
            await asyncio.wait({sending, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await serving
        except BaseException:
            broken.set()
            raise
        finally:
            tasks = (sending, serving, breaking)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if broken.is_set():
                await self._leave()
        fleet.fail_remaining("served", SyncError("another engine of its group failed"))

    async def _send(self) -> None:
        async with contextlib.aclosing(self._backend.tensors()) as tensors:
            async for _, tensor in tensors:
                with route_errors():
                    await asyncio.to_thread(_broadcast, self._group, tensor)

    async def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.destroy)

    async def close(self) -> None:
        await self._leave()

    async def _metadata(self) -> Json:
        names: list[str] = []
        dtypes: list[str] = []
        shapes: list[list[int]] = []
        async for name, tensor in self._backend.tensors():
            names.append(name)
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(list(tensor.shape))
        return {"names": names, "dtype_names": dtypes, "shapes": shapes}

    async def _meet(self, policy: Policy, fleet: PushTargets) -> None:
        """Ask every engine for the size of its own world, then all join one group at the same time."""
        await self._leave()
        sizes: dict[int, int] = {}

        async def ask(engine: Engine) -> None:
            sizes[id(engine)] = (await engine.stage(WeightTransfer(policy, "nccl", {})))["world_size"]

        await fleet.run("announced", ask)
        plan = plan_group([sizes[id(engine)] for engine in fleet.engines], self._host, _free_port(self._host))
        invited = dict(zip(map(id, fleet.engines), plan, strict=True))

        async def invite(engine: Engine) -> None:
            await engine.stage(WeightTransfer(policy, "nccl", {"init": invited[id(engine)]}))

        self._members = fleet.engines
        joining = asyncio.create_task(fleet.run("met", invite))
        try:
            with route_errors():
                self._group = await asyncio.to_thread(_join, plan[0]) if plan else None
            await joining
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)


def plan_group(sizes: list[int], host: str, port: int) -> list[Json]:
    """What each engine is told: rank 0 is the trainer, the engines' workers follow one after another."""
    world, told, offset = 1 + sum(sizes), list[Json](), 1
    for size in sizes:
        told.append({"master_address": host, "master_port": port, "rank_offset": offset, "world_size": world})
        offset += size
    return told


def _join(place: Json) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import (  # pyright: ignore[reportMissingImports]
        trainer_init,
    )

    return trainer_init(place)


def _broadcast(group: Any, tensor: Any) -> None:
    import torch

    group.broadcast(tensor.cuda().contiguous(), src=0, stream=torch.cuda.current_stream())
    torch.cuda.current_stream().synchronize()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
