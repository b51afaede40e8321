"""Tests for engines that copy weights from the trainer's memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import ClassVar

import msgspec
import pytest
import torch
from torch import Tensor

from instar.engines.vllm.extension import create_buffer_views, load_in_place, open_buffer
from instar.errors import EngineError, EngineUnavailable, SyncError
from instar.sync.base import RouteError
from instar.sync.shared import SharedBuffer, SharedSync, probe_shared_memory
from instar.types import Artifact, Policy
from tests.unit.sync.fakes import FusedModel, WeightReceivingEngine, WeightSendingBackend, has_weights


def make_policy(version: int) -> Policy:
    return Policy("p", version, Artifact("live"))


async def test_push_copies_the_weights_to_all_engines() -> None:
    backend, engines = WeightSendingBackend(), [WeightReceivingEngine(), WeightReceivingEngine()]
    sync = SharedSync(backend, device="cpu", timeout=60)
    for version in (1, 2, 3):
        backend.value = 10.0 * version
        assert await sync.push(make_policy(version), engines) == [None, None]
        assert all(has_weights(engine, 10.0 * version) and engine.version == version for engine in engines)
        assert all(engine.has_copy_plan for engine in engines)
    await sync.close()


async def test_push_sends_the_layout_once_per_engine() -> None:
    backend, engine = WeightSendingBackend(), WeightReceivingEngine()
    sync = SharedSync(backend, device="cpu", timeout=60)
    await sync.push(make_policy(1), [engine])
    first_push_bytes, engine.received_bytes = engine.received_bytes, 0
    await sync.push(make_policy(2), [engine])
    assert engine.received_bytes < first_push_bytes / 4
    restarted_engine = WeightReceivingEngine()
    backend.value = 7.0
    assert await sync.push(make_policy(2), [restarted_engine]) == [None]
    assert has_weights(restarted_engine, 7.0)
    await sync.close()


@pytest.mark.parametrize("failing_method", ["stage", "commit"])
async def test_push_failure_keeps_the_engine_version_and_updates_others(failing_method: str) -> None:
    failing_engine = WeightReceivingEngine(failing_method=failing_method)
    healthy_engine = WeightReceivingEngine()
    sync = SharedSync(WeightSendingBackend(), device="cpu", timeout=60)
    failed, succeeded = await sync.push(make_policy(4), [failing_engine, healthy_engine])
    assert isinstance(failed, SyncError)
    assert "version 4 of p" in str(failed)
    assert isinstance(failed.__cause__, EngineError)
    assert succeeded is None
    assert (failing_engine.version, healthy_engine.version) == (0, 4)
    failing_engine.failing_method = ""
    assert await sync.push(make_policy(4), [failing_engine]) == [None]
    assert failing_engine.version == 4
    await sync.close()


async def test_push_fails_after_the_timeout() -> None:
    class SlowBackend(WeightSendingBackend):
        async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
            await asyncio.sleep(60)
            yield "unused", torch.zeros(1)

    (outcome,) = await SharedSync(SlowBackend(), device="cpu", timeout=0.05).push(
        make_policy(1), [WeightReceivingEngine()]
    )
    assert isinstance(outcome, SyncError)
    assert "0.05 s" in str(outcome)


class LateEngine(WeightReceivingEngine):
    """Copies the weights when ``may_copy`` is set, even if the caller was cancelled, like a remote engine."""

    def __init__(self) -> None:
        super().__init__()
        self.may_copy = asyncio.Event()
        self.copy_task: asyncio.Task[None] | None = None

    async def commit(self, policy: Policy) -> None:
        self.copy_task = asyncio.create_task(self._commit_later(policy))
        await asyncio.shield(self.copy_task)

    async def _commit_later(self, policy: Policy) -> None:
        await self.may_copy.wait()
        await super().commit(policy)


async def test_push_does_not_overwrite_a_buffer_that_an_engine_may_still_copy() -> None:
    backend, late_engine, healthy_engine = WeightSendingBackend(), LateEngine(), WeightReceivingEngine()
    sync = SharedSync(backend, device="cpu", timeout=0.5)
    backend.value = 10.0
    failed, succeeded = await sync.push(make_policy(1), [late_engine, healthy_engine])
    assert "longer than 0.5 s" in str(failed)
    assert succeeded is None
    backend.value = 20.0
    assert await sync.push(make_policy(2), [healthy_engine]) == [None]
    assert has_weights(healthy_engine, 20.0)
    assert late_engine.copy_task is not None
    late_engine.may_copy.set()
    await late_engine.copy_task
    assert late_engine.version == 1
    assert has_weights(late_engine, 10.0)
    backend.value = 30.0
    assert await sync.push(make_policy(3), [late_engine, healthy_engine]) == [None, None]
    assert has_weights(late_engine, 30.0)
    assert has_weights(healthy_engine, 30.0)
    await sync.close()


@pytest.mark.parametrize(
    ("failure", "replaces_buffer"),
    [(EngineError("rejected"), False), (EngineUnavailable("disconnected"), True)],
)
async def test_push_replaces_the_buffer_only_if_a_commit_may_still_run(
    failure: EngineError, replaces_buffer: bool
) -> None:
    class FailingEngine(WeightReceivingEngine):
        async def commit(self, policy: Policy) -> None:
            raise failure

    sync = SharedSync(WeightSendingBackend(), device="cpu", timeout=60)
    await sync.push(make_policy(1), [FailingEngine()])
    first_buffer = sync._buffer
    engine = WeightReceivingEngine()
    assert await sync.push(make_policy(1), [engine]) == [None]
    assert (sync._buffer is not first_buffer) == replaces_buffer
    await sync.close()


async def test_push_returns_buffer_errors_as_outcome() -> None:
    class FailingOnceBuffer(SharedBuffer):
        errors: ClassVar = ["CUDA error: out of memory"]

        def synchronize(self) -> None:
            if self.errors:
                raise RuntimeError(self.errors.pop())

    sync = SharedSync(WeightSendingBackend(), device="cpu", timeout=60, create_buffer=FailingOnceBuffer)
    (outcome,) = await sync.push(make_policy(1), [WeightReceivingEngine()])
    assert isinstance(outcome, SyncError)
    assert isinstance(outcome.__cause__, RouteError)
    assert "out of memory" in str(outcome)
    assert await sync.push(make_policy(1), [WeightReceivingEngine()]) == [None]
    await sync.close()


async def test_push_raises_backend_errors() -> None:
    class FailingBackend(WeightSendingBackend):
        async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
            raise RuntimeError("out of memory")
            yield  # makes this an async generator

    with pytest.raises(RuntimeError, match="out of memory"):
        await SharedSync(FailingBackend(), device="cpu", timeout=60).push(
            make_policy(1), [WeightReceivingEngine()]
        )


async def test_push_loads_the_base_model_without_sending_weights() -> None:
    engine = WeightReceivingEngine()
    engine.version = 3
    sync = SharedSync(WeightSendingBackend(), device="cpu", timeout=60)
    assert await sync.push(Policy("p", 0, Artifact("base")), [engine]) == [None]
    assert engine.version == 0
    assert not engine.received_bytes


async def test_probe_shared_memory_detects_a_local_engine() -> None:
    assert await probe_shared_memory(WeightReceivingEngine()) == {"shared": True, "gpus": []}


async def test_shared_buffer_is_readable_in_another_process() -> None:
    buffer = SharedBuffer([("a", "bfloat16", [2, 3], 0), ("b", "float32", [4], 256)], "cpu")
    buffer.views["a"].fill_(1.5)
    buffer.views["b"].copy_(torch.arange(4))
    program = (
        "import json, sys, torch\n"
        "from instar.engines.vllm.extension import open_buffer, create_buffer_views\n"
        "handle, layout = json.loads(sys.argv[1])\n"
        "views = dict(create_buffer_views(open_buffer(handle, torch.device('cpu')), layout))\n"
        "print(views['a'].sum().item(), views['b'].tolist(), views['a'].dtype)\n"
    )
    arguments = msgspec.json.encode([buffer.handle, buffer.layout]).decode()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    assert output.decode().split("\n")[0] == "9.0 [0.0, 1.0, 2.0, 3.0] torch.bfloat16"
    buffer.close()


def test_load_in_place_requires_all_weights_and_returns_no_plan_if_they_are_not_plain_copies() -> None:
    class ScalingModel(FusedModel):
        def load_weights(self, weights: object) -> set[str]:
            return super().load_weights((name, tensor * 2) for name, tensor in weights)  # pyright: ignore

    buffer = SharedBuffer(
        [("embed.weight", "float32", [10, 4], 0), ("norm.weight", "float32", [4], 256)], "cpu"
    )
    mapped = open_buffer(buffer.handle, torch.device("cpu"))
    model = ScalingModel()
    incomplete_weights = create_buffer_views(mapped, buffer.layout)
    with pytest.raises(ValueError, match=r"qk\.weight"):
        load_in_place(model, incomplete_weights, mapped)
    weights = [*incomplete_weights, ("q.weight", torch.ones(4, 4)), ("k.weight", torch.ones(2, 4))]
    assert load_in_place(model, weights, mapped) is None
    assert load_in_place(FusedModel(), weights, mapped) is None  # q and k are not in the buffer
    buffer.close()
