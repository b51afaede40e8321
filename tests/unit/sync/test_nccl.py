"""Tests for weight broadcasts to a group of engines, any of which may fail."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from instar.engines.base import WeightTransfer
from instar.errors import EngineError
from instar.sync import nccl
from instar.types import Artifact, Json, Policy
from tests.unit.sync.fakes import WeightReceivingEngine, WeightSendingBackend, has_weights


class FakeGroup:
    """A fake NCCL group. A broadcast ends when every member has received it or the group is destroyed."""

    def __init__(self) -> None:
        self.mailboxes: list[queue.Queue[Tensor]] = []
        self.destroyed = threading.Event()

    def broadcast(self, tensor: Tensor) -> None:
        for mailbox in self.mailboxes:
            mailbox.put(tensor)
        while any(mailbox.unfinished_tasks for mailbox in self.mailboxes):
            if self.destroyed.wait(0.002):
                return

    def destroy(self) -> None:
        self.destroyed.set()


class FakeRendezvous:
    """Creates the fake groups. A group is complete when all of its members have joined."""

    def __init__(self) -> None:
        self.groups: list[FakeGroup] = []
        self.mailboxes_by_port: dict[int, list[queue.Queue[Tensor]]] = {}

    def join(self, init_info: Json) -> FakeGroup:
        group = FakeGroup()
        group.mailboxes = self.mailboxes_by_port.setdefault(init_info["master_port"], [])
        while len(group.mailboxes) < init_info["world_size"] - 1:
            time.sleep(0.001)
        self.groups.append(group)
        return group


class GroupMemberEngine(WeightReceivingEngine):
    def __init__(self, rendezvous: FakeRendezvous, failing_method: str = "") -> None:
        super().__init__(routes=("nccl",), failing_method=failing_method)
        self._rendezvous = rendezvous
        self.mailbox: queue.Queue[Tensor] | None = None
        self.weight_names: list[str] = []

    async def stage(self, transfer: WeightTransfer) -> Json:
        if "init" in transfer.body:
            self.mailbox = queue.Queue()
            self._rendezvous.mailboxes_by_port.setdefault(transfer.body["init"]["master_port"], []).append(
                self.mailbox
            )
        if "update" in transfer.body:
            self.weight_names = transfer.body["update"]["names"]
        return {"world_size": 1}

    async def commit(self, policy: Policy) -> None:
        if self.failing_method == "commit":
            raise EngineError("the GPU failed")
        assert self.mailbox is not None
        for name in self.weight_names:
            while self.mailbox.empty():  # noqa: ASYNC110 - a thread fills it
                await asyncio.sleep(0.001)
            self.model.load_weights([(name, self.mailbox.get())])
            self.mailbox.task_done()
        self.version = policy.version


class FakeTransport(nccl.NcclTransport):
    def __init__(self, rendezvous: FakeRendezvous, *, error: str = "") -> None:
        self._rendezvous = rendezvous
        self._error = error

    def join(self, init_info: Json) -> FakeGroup:
        return self._rendezvous.join(init_info)

    def broadcast(self, group: FakeGroup, tensor: Tensor) -> None:
        if self._error:
            raise RuntimeError(self._error)
        group.broadcast(tensor)


@pytest.fixture
def rendezvous() -> FakeRendezvous:
    return FakeRendezvous()


def make_policy(version: int) -> Policy:
    return Policy("p", version, Artifact("live"))


def create_sync(
    backend: Any, rendezvous: FakeRendezvous, timeout: float = 60, error: str = ""
) -> nccl.NcclSync:
    transport = FakeTransport(rendezvous, error=error)
    return nccl.NcclSync(backend, host="127.0.0.1", timeout=timeout, transport=transport)


def test_plan_group_assigns_distinct_ranks() -> None:
    init_infos = nccl.plan_group([2, 1, 4], "10.0.0.1", 29500)
    assert [init_info["rank_offset"] for init_info in init_infos] == [1, 3, 4]
    assert {init_info["world_size"] for init_info in init_infos} == {8}
    assert {init_info["master_address"] for init_info in init_infos} == {"10.0.0.1"}


async def test_push_broadcasts_to_all_engines_in_one_group(rendezvous: FakeRendezvous) -> None:
    backend, engines = WeightSendingBackend(), [GroupMemberEngine(rendezvous), GroupMemberEngine(rendezvous)]
    sync = create_sync(backend, rendezvous)
    for version in (1, 2, 3):
        backend.value = 10.0 * version
        assert await sync.push(make_policy(version), engines) == [None, None]
        assert all(has_weights(engine, 10.0 * version) and engine.version == version for engine in engines)
    await sync.close()
    (group,) = rendezvous.groups
    assert group.destroyed.is_set()


async def test_push_aborts_the_broadcast_if_a_member_fails(rendezvous: FakeRendezvous) -> None:
    """The push must not wait for the timeout, because a broadcast blocks the trainer's GPU."""
    failing_engine = GroupMemberEngine(rendezvous, failing_method="commit")
    healthy_engine = GroupMemberEngine(rendezvous)
    sync = create_sync(WeightSendingBackend(), rendezvous)
    async with asyncio.timeout(10):
        failing_outcome, healthy_outcome = await sync.push(make_policy(1), [failing_engine, healthy_engine])
    assert "the GPU failed" in str(failing_outcome)
    assert "another engine in the NCCL group failed" in str(healthy_outcome)
    assert rendezvous.groups[0].destroyed.is_set()
    assert healthy_engine.version == 0
    failing_engine.failing_method = ""
    assert await sync.push(make_policy(1), [failing_engine, healthy_engine]) == [None, None]
    assert has_weights(healthy_engine, 0.0)
    assert len(rendezvous.groups) == 2
    await sync.close()


async def test_push_destroys_the_group_after_the_timeout(rendezvous: FakeRendezvous) -> None:
    class HangingEngine(GroupMemberEngine):
        async def commit(self, policy: Policy) -> None:
            await asyncio.sleep(60)

    sync = create_sync(WeightSendingBackend(), rendezvous, timeout=0.3)
    (outcome,) = await sync.push(make_policy(1), [HangingEngine(rendezvous)])
    assert "longer than 0.3 s" in str(outcome)
    assert rendezvous.groups[0].destroyed.is_set()


async def test_push_succeeds_for_engines_that_serve_the_version_before_the_timeout(
    rendezvous: FakeRendezvous,
) -> None:
    class SlowEngine(GroupMemberEngine):
        async def commit(self, policy: Policy) -> None:
            await super().commit(policy)
            await asyncio.sleep(60)

    slow_engine, healthy_engine = SlowEngine(rendezvous), GroupMemberEngine(rendezvous)
    slow_outcome, healthy_outcome = await create_sync(WeightSendingBackend(), rendezvous, timeout=1.0).push(
        make_policy(1), [slow_engine, healthy_engine]
    )
    assert "longer than 1 s" in str(slow_outcome)
    assert healthy_outcome is None
    assert healthy_engine.version == 1


async def test_push_returns_broadcast_errors_as_outcome(rendezvous: FakeRendezvous) -> None:
    error = "NCCL error: remote process exited"
    sync = create_sync(WeightSendingBackend(), rendezvous, error=error)
    (outcome,) = await sync.push(make_policy(1), [GroupMemberEngine(rendezvous)])
    assert "remote process exited" in str(outcome)
    assert rendezvous.groups[0].destroyed.is_set()


async def test_push_destroys_the_group_if_the_backend_fails(rendezvous: FakeRendezvous) -> None:
    class FailingBackend(WeightSendingBackend):
        read_count = 0

        async def tensors(self) -> Any:
            self.read_count += 1
            yield "embed.weight", torch.zeros(10, 4)
            if self.read_count > 1:  # the first read only describes the weights
                raise RuntimeError("out of memory")
            yield "norm.weight", torch.zeros(4)

    engine = GroupMemberEngine(rendezvous)
    with pytest.raises(RuntimeError, match="out of memory"):
        await create_sync(FailingBackend(), rendezvous).push(make_policy(1), [engine])
    assert rendezvous.groups[0].destroyed.is_set()
    assert engine.version == 0


async def test_push_creates_a_new_group_for_a_new_engine(rendezvous: FakeRendezvous) -> None:
    first, second = GroupMemberEngine(rendezvous), GroupMemberEngine(rendezvous)
    sync = create_sync(WeightSendingBackend(), rendezvous)
    assert await sync.push(make_policy(1), [first]) == [None]
    assert await sync.push(make_policy(2), [first, second]) == [None, None]
    assert (first.version, second.version) == (2, 2)
    assert [group.destroyed.is_set() for group in rendezvous.groups] == [True, False]
    await sync.close()
