"""Weights that are broadcast: a group of the trainer and all engines, which a member may fall out of."""

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


class Group:
    """In place of NCCL: a broadcast ends when every member has taken it, or the group is left."""

    def __init__(self) -> None:
        self.mailboxes: list[queue.Queue[Tensor]] = []
        self.left = threading.Event()

    def broadcast(self, tensor: Tensor) -> None:
        for mailbox in self.mailboxes:
            mailbox.put(tensor)
        while any(mailbox.unfinished_tasks for mailbox in self.mailboxes):
            if self.left.wait(0.002):
                return

    def destroy(self) -> None:
        self.left.set()


class Meeting:
    """Where the members find each other."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.invited: dict[int, list[queue.Queue[Tensor]]] = {}

    def join(self, place: Json) -> Group:
        group = Group()
        group.mailboxes = self.invited.setdefault(place["master_port"], [])
        while len(group.mailboxes) < place["world_size"] - 1:
            time.sleep(0.001)
        self.groups.append(group)
        return group


class GroupMember(WeightReceivingEngine):
    def __init__(self, meeting: Meeting, failing: str = "") -> None:
        super().__init__(routes=("nccl",), failing=failing)
        self.meeting = meeting
        self.mailbox: queue.Queue[Tensor] | None = None
        self.names: list[str] = []

    async def stage(self, transfer: WeightTransfer) -> Json:
        if "init" in transfer.body:
            self.mailbox = queue.Queue()
            self.meeting.invited.setdefault(transfer.body["init"]["master_port"], []).append(self.mailbox)
        if "update" in transfer.body:
            self.names = transfer.body["update"]["names"]
        return {"world_size": 1}

    async def commit(self, policy: Policy) -> None:
        if self.failing == "commit":
            raise EngineError("the GPU is gone")
        assert self.mailbox is not None
        for name in self.names:
            while self.mailbox.empty():  # noqa: ASYNC110 - a thread fills it
                await asyncio.sleep(0.001)
            self.model.load_weights([(name, self.mailbox.get())])
            self.mailbox.task_done()
        self.version = policy.version


class FakeTransport(nccl.NcclTransport):
    def __init__(self, meeting: Meeting, *, error: str = "") -> None:
        self._meeting = meeting
        self._error = error

    def join(self, init_info: Json) -> Group:
        return self._meeting.join(init_info)

    def broadcast(self, group: Group, tensor: Tensor) -> None:
        if self._error:
            raise RuntimeError(self._error)
        group.broadcast(tensor)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def policy(version: int) -> Policy:
    return Policy("p", version, Artifact("live"))


def create_sync(backend: Any, meeting: Meeting, deadline: float = 60, error: str = "") -> nccl.NcclSync:
    transport = FakeTransport(meeting, error=error)
    return nccl.NcclSync(backend, host="127.0.0.1", deadline=deadline, transport=transport)


async def test_push_broadcasts_to_all_engines_in_one_group(meeting: Meeting) -> None:
    backend, engines = WeightSendingBackend(), [GroupMember(meeting), GroupMember(meeting)]
    sync = create_sync(backend, meeting)
    for version in (1, 2, 3):
        backend.value = 10.0 * version
        assert await sync.push(policy(version), engines) == [None, None]
        assert all(has_weights(engine, 10.0 * version) and engine.version == version for engine in engines)
    await sync.close()
    (group,) = meeting.groups
    assert group.left.is_set()


async def test_push_aborts_the_broadcast_if_a_member_fails(meeting: Meeting) -> None:
    """Long before the deadline: a broadcast would hold up the trainer's GPU until then."""
    backend, bad, good = WeightSendingBackend(), GroupMember(meeting, failing="commit"), GroupMember(meeting)
    sync = create_sync(backend, meeting)
    async with asyncio.timeout(10):
        outcome, other = await sync.push(policy(1), [bad, good])
    assert "the GPU is gone" in str(outcome)
    assert "another engine of its group failed" in str(other)
    assert meeting.groups[0].left.is_set()
    assert good.version == 0
    bad.failing = ""
    assert await sync.push(policy(1), [bad, good]) == [None, None]
    assert has_weights(good, 0.0)
    assert len(meeting.groups) == 2
    await sync.close()


async def test_push_destroys_the_group_after_the_deadline(meeting: Meeting) -> None:
    class Silent(GroupMember):
        async def commit(self, policy: Policy) -> None:
            await asyncio.sleep(60)

    sync = create_sync(WeightSendingBackend(), meeting, deadline=0.3)
    (outcome,) = await sync.push(policy(1), [Silent(meeting)])
    assert "longer than 0.3 s" in str(outcome)
    assert meeting.groups[0].left.is_set()


async def test_push_succeeds_for_engines_that_serve_the_version_at_the_deadline(meeting: Meeting) -> None:
    class Slow(GroupMember):
        async def commit(self, policy: Policy) -> None:
            await super().commit(policy)
            await asyncio.sleep(60)

    slow, good = Slow(meeting), GroupMember(meeting)
    outcome, fine = await create_sync(WeightSendingBackend(), meeting, deadline=1.0).push(
        policy(1), [slow, good]
    )
    assert "longer than 1 s" in str(outcome)
    assert fine is None
    assert good.version == 1


async def test_push_returns_broadcast_errors_as_outcome(meeting: Meeting) -> None:
    error = "NCCL error: remote process exited"
    sync = create_sync(WeightSendingBackend(), meeting, error=error)
    (outcome,) = await sync.push(policy(1), [GroupMember(meeting)])
    assert "remote process exited" in str(outcome)
    assert meeting.groups[0].left.is_set()


async def test_push_destroys_the_group_if_the_backend_fails(meeting: Meeting) -> None:
    class Failing(WeightSendingBackend):
        reads = 0

        async def tensors(self) -> Any:
            self.reads += 1
            yield "embed.weight", torch.zeros(10, 4)
            if self.reads > 1:
                raise RuntimeError("out of memory")
            yield "norm.weight", torch.zeros(4)

    engine = GroupMember(meeting)
    with pytest.raises(RuntimeError, match="out of memory"):
        await create_sync(Failing(), meeting).push(policy(1), [engine])
    assert meeting.groups[0].left.is_set()
    assert engine.version == 0


async def test_push_creates_a_new_group_for_a_new_engine(meeting: Meeting) -> None:
    backend, first, second = WeightSendingBackend(), GroupMember(meeting), GroupMember(meeting)
    sync = create_sync(backend, meeting)
    assert await sync.push(policy(1), [first]) == [None]
    assert await sync.push(policy(2), [first, second]) == [None, None]
    assert (first.version, second.version) == (2, 2)
    assert [group.left.is_set() for group in meeting.groups] == [True, False]
    await sync.close()
