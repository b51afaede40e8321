"""The route `nccl`: vLLM's weight-transfer API, over NCCL, between the GPUs of trainer and engines.

The trainer is rank 0 of a group with all workers of all engines and broadcasts each weight once. vLLM loads
while it receives, so there is no separate staging: an engine that fails in the middle reports the failure and
serves nothing until it loads a policy. A group lasts as long as its engines; when one is replaced, a new
group is formed. A broadcast that a member does not take part in never ends: leaving the group aborts it.

Tested with vLLM 0.26, with trainer and engine on one GPU; not yet with several GPUs.
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
    """Raise ConfigError if vLLM is not installed. The route uses its communicator."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ConfigError(
            "sync.route: 'nccl' needs vLLM in the trainer's environment (backend.python) too, for its "
            "communicator"
        )


class NcclSync(LiveSync):
    def __init__(
        self, backend: Backend, *, host: str, deadline: float, transport: NcclTransport | None = None
    ) -> None:
        """``host`` is the trainer's address as seen by the engines' workers."""
        super().__init__(backend, deadline=deadline)
        self._transport = transport or NcclTransport()
        self._host = host
        self._group: Any = None
        self._members: list[Engine] = []
        self._update: Json | None = None

    @property
    def description(self) -> str:
        return "nccl: broadcast from the trainer's GPU to the engines'"

    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        if self._update is None:
            self._update = await self._metadata()
        if self._group is None or self._members != targets.engines:
            await self._form_group(policy, targets)
        body: Json = {"update": self._update}
        await targets.run("announced", lambda engine: engine.stage(WeightTransfer(policy, "nccl", body)))
        if targets.engines != self._members:
            # A missing member would block the broadcast, so the others form a new group at the next push.
            await self._leave_group()
            targets.fail_remaining("broadcast", SyncError("another engine of its group is gone"))

    async def _commit(self, policy: Policy, targets: PushTargets) -> None:
        broken = asyncio.Event()

        async def commit(engine: Engine) -> None:
            try:
                await engine.commit(policy)
            except BaseException:  # after any error, the broadcast would never end
                broken.set()
                raise

        sending = asyncio.create_task(self._send())
        serving = asyncio.create_task(targets.commit(commit))
        breaking = asyncio.create_task(broken.wait())
        try:
            await asyncio.wait({sending, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await serving
        except BaseException:  # also when cancelled: the group is no longer usable
            broken.set()
            raise
        finally:
            tasks = (sending, serving, breaking)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if broken.is_set():
                await self._leave_group()
        targets.fail_remaining("served", SyncError("another engine of its group failed"))

    async def _send(self) -> None:
        async with contextlib.aclosing(self._backend.tensors()) as tensors:
            async for _, tensor in tensors:
                with route_errors():
                    await asyncio.to_thread(self._transport.broadcast, self._group, tensor)

    async def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.destroy)

    async def close(self) -> None:
        await self._leave_group()

    async def _metadata(self) -> Json:
        names: list[str] = []
        dtypes: list[str] = []
        shapes: list[list[int]] = []
        async for name, tensor in self._backend.tensors():
            names.append(name)
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(list(tensor.shape))
        return {"names": names, "dtype_names": dtypes, "shapes": shapes}

    async def _form_group(self, policy: Policy, targets: PushTargets) -> None:
        """Query the number of workers of every engine, then let all of them join one group at the same
        time."""
        await self._leave_group()
        sizes: dict[int, int] = {}

        async def query(engine: Engine) -> None:
            sizes[id(engine)] = (await engine.stage(WeightTransfer(policy, "nccl", {})))["world_size"]

        await targets.run("announced", query)
        plan = plan_group(
            [sizes[id(engine)] for engine in targets.engines], self._host, _free_port(self._host)
        )
        init_infos = dict(zip(map(id, targets.engines), plan, strict=True))

        async def invite(engine: Engine) -> None:
            await engine.stage(WeightTransfer(policy, "nccl", {"init": init_infos[id(engine)]}))

        self._members = targets.engines
        joining = asyncio.create_task(targets.run("joined to the group", invite))
        try:
            with route_errors():
                self._group = await asyncio.to_thread(self._transport.join, plan[0]) if plan else None
            await joining
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)


def plan_group(sizes: list[int], host: str, port: int) -> list[Json]:
    """Return the init info of each engine. Rank 0 is the trainer, followed by the workers of each engine."""
    world, init_infos, offset = 1 + sum(sizes), list[Json](), 1
    for size in sizes:
        init_infos.append(
            {"master_address": host, "master_port": port, "rank_offset": offset, "world_size": world}
        )
        offset += size
    return init_infos


class NcclTransport:
    """Wraps the calls to vLLM's communicator."""

    def join(self, init_info: Json) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import (  # pyright: ignore[reportMissingImports]
            trainer_init,
        )

        return trainer_init(init_info)

    def broadcast(self, group: Any, tensor: Any) -> None:
        import torch

        group.broadcast(tensor.cuda().contiguous(), src=0, stream=torch.cuda.current_stream())
        torch.cuda.current_stream().synchronize()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
