"""The `nccl` route: the trainer's GPU sends weights to the engines' GPUs over NCCL, with vLLM's weight
transfer API.

The trainer is rank 0 of a group with all workers of all engines, and broadcasts each weight once. vLLM loads
the weights while it receives them, so there is no separate staging. An engine that fails during the broadcast
reports the failure and serves nothing until it loads a policy. A new group is formed after a failure and when
the engines change. A broadcast hangs if a member is missing, so the trainer leaves the group in that case.

The route has been tested with vLLM 0.26 on one GPU shared by trainer and engine, but not with several GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable
from typing import Any

from instar.async_utils import cancel_and_wait
from instar.backends.base import Backend
from instar.engines.base import Engine, WeightTransfer
from instar.errors import SyncError
from instar.sync.live import LiveSync, PushTargets, convert_route_errors, describe_weight
from instar.types import Json, Policy


class NcclSync(LiveSync):
    description = "nccl: broadcast from the trainer's GPU to the engines' GPUs"

    def __init__(
        self, backend: Backend, *, host: str, timeout: float, transport: NcclTransport | None = None
    ) -> None:
        """``host`` is the address at which the engines' workers reach the trainer."""
        super().__init__(backend, timeout=timeout)
        self._transport = transport or NcclTransport()
        self._host = host
        self._group: Any = None
        self._members: list[Engine] = []
        self._weight_info: Json | None = None

    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        if self._weight_info is None:
            weights = [describe_weight(*weight) async for weight in self._backend.tensors()]
            keys = ("names", "dtype_names", "shapes")
            self._weight_info = {key: [weight[i] for weight in weights] for i, key in enumerate(keys)}
        if self._group is None or self._members != targets.healthy_engines:
            await self._form_group(policy, targets)
        body: Json = {"update": self._weight_info}
        await targets.run("announced", lambda engine: engine.stage(WeightTransfer(policy, "nccl", body)))
        if targets.healthy_engines != self._members:
            # The broadcast would wait for the missing member, so the next push forms a group without it.
            await self._leave_group()
            targets.fail_remaining("broadcast", SyncError("another engine in the NCCL group failed"))

    async def _commit(self, policy: Policy, targets: PushTargets) -> None:
        group_failed = asyncio.Event()

        async def commit(engine: Engine) -> None:
            try:
                await engine.commit(policy)
            except BaseException:  # including cancellation: the broadcast would hang
                group_failed.set()
                raise

        send_task = asyncio.create_task(self._broadcast_weights())
        commit_task = asyncio.create_task(targets.commit(commit))
        failure_task = asyncio.create_task(group_failed.wait())
        try:
            await asyncio.wait({send_task, failure_task}, return_when=asyncio.FIRST_COMPLETED)
            if send_task.done():
                send_task.result()
                await commit_task
        except BaseException:  # including cancellation: the group is no longer usable
            group_failed.set()
            raise
        finally:
            await cancel_and_wait(send_task, commit_task, failure_task)
            if group_failed.is_set():
                await self._leave_group()
        targets.fail_remaining("served", SyncError("another engine in the NCCL group failed"))

    async def _broadcast_weights(self) -> None:
        async with contextlib.aclosing(self._backend.tensors()) as tensors:
            async for _, tensor in tensors:
                with convert_route_errors():
                    await asyncio.to_thread(self._transport.broadcast, self._group, tensor)

    async def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.destroy)

    async def close(self) -> None:
        await self._leave_group()

    async def _form_group(self, policy: Policy, targets: PushTargets) -> None:
        """Query each engine's number of workers, and have all engines join one group concurrently."""
        await self._leave_group()
        worker_counts: dict[Engine, int] = {}

        async def query(engine: Engine) -> None:
            response = await engine.stage(WeightTransfer(policy, "nccl", {}))
            worker_counts[engine] = response["world_size"]

        await targets.run("sent, because the engine did not report its workers", query)
        self._members = targets.healthy_engines
        counts = [worker_counts[engine] for engine in self._members]
        with socket.create_server((self._host, 0)) as server:
            port = server.getsockname()[1]
        init_infos = plan_group(counts, self._host, port)
        info_by_engine = dict(zip(self._members, init_infos, strict=True))

        def invite(engine: Engine) -> Awaitable[object]:
            return engine.stage(WeightTransfer(policy, "nccl", {"init": info_by_engine[engine]}))

        invitation = targets.run("sent, because the engine did not join the group", invite)
        join_task = asyncio.create_task(invitation)
        try:
            with convert_route_errors():
                if init_infos:
                    self._group = await asyncio.to_thread(self._transport.join, init_infos[0])
            await join_task
        finally:
            await cancel_and_wait(join_task)


def plan_group(worker_counts: list[int], host: str, port: int) -> list[Json]:
    """Return the init info for each engine. The trainer is rank 0, followed by the workers of each engine."""
    address = {"master_address": host, "master_port": port, "world_size": 1 + sum(worker_counts)}
    return [{**address, "rank_offset": 1 + sum(worker_counts[:index])} for index in range(len(worker_counts))]


class NcclTransport:
    def join(self, init_info: Json) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import (  # pyright: ignore[reportMissingImports]
            trainer_init,
        )

        return trainer_init(init_info)

    def broadcast(self, group: Any, tensor: Any) -> None:
        import torch

        group.broadcast(tensor.cuda().contiguous(), src=0, stream=torch.cuda.current_stream())
        torch.cuda.current_stream().synchronize()
