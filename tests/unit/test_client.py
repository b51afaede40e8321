"""Tests for `instar.client` against a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from instar.client import Client, Slot
from instar.config import RunConfig
from instar.engines.factory import create_engine
from instar.errors import EngineUnavailable, GatewayError, InstarError, RunFinished
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import Channel, GroupStatus, SessionStatus, StepState
from tests.serving import ADMIN_KEY, running_gateway
from tests.tiny import make_tiny_model

TASK = {"question": "2 + 2"}


def make_config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"name": str(folder), "max_context": 512},
            "engine": {"type": "scripted", "function": "tests.unit.gateway.scripts:reply"},
            "trainer": {"mode": "sync", "groups_per_step": 1, "steps": 1},
            "groups": {"group_policy": "refill"},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, context=512)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    await store.put_run(Run("run", "run", {}))
    yield store
    await store.close()


@pytest.fixture
async def client(model: Path, store: SqliteStore) -> AsyncGenerator[Client]:
    config = make_config(model)
    async with running_gateway(config, store, create_engine(config)) as url:
        async with Client(url, ADMIN_KEY, max_wait=1.0) as client:
            yield client


async def call_model(slot: Slot) -> str | None:
    async with openai.AsyncOpenAI(base_url=slot.base_url, api_key=slot.api_key) as agent:
        messages: Any = [{"role": "user", "content": "hi"}]
        reply = await agent.chat.completions.create(model="instar", messages=messages)
    return reply.choices[0].message.content


async def wait_until(client: Client, group_id: str, status: GroupStatus) -> None:
    async with asyncio.timeout(20):
        while (await client.get_group(group_id)).status is not status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_client_runs_a_group_from_start_to_end(client: Client) -> None:
    group = await client.open_group(TASK, size=2, task_id="sum", deadline_s=60)
    assert (group.status, group.view.task, group.view.task_id) == (GroupStatus.OPEN, TASK, "sum")
    for number, slot in enumerate(group.slots):
        assert await call_model(slot) == "You said: hi"
        ended = await slot.complete(reward=float(number), metadata={"runner": "test"})
        assert ended.changed
        assert not (await slot.complete(reward=5.0)).changed
    await wait_until(client, group.group_id, GroupStatus.READY)
    await group.refresh()
    assert [slot.view.reward for slot in group.slots] == [0.0, 1.0]
    assert not any(slot.is_open for slot in group.slots)
    with pytest.raises(InstarError, match="is completed and has no key"):
        _ = group.slots[0].api_key


async def test_failed_slot_is_replaced_and_group_can_be_abandoned(client: Client) -> None:
    group = await client.open_group(TASK, size=2)
    first = group.slots[0]
    assert (await first.fail("no container")).status is SessionStatus.FAILED
    async with asyncio.timeout(20):
        while group.slots[0].session_id == first.session_id or not group.slots[0].is_open:
            await asyncio.sleep(0.02)
            await group.refresh()
    await group.abandon()
    assert group.status is GroupStatus.DROPPED
    assert not any(slot.is_open for slot in group.slots)


async def test_open_group_waits_until_the_trainer_admits_it(client: Client, store: SqliteStore) -> None:
    first = await client.open_group(TASK, size=2)
    with pytest.raises(EngineUnavailable, match="enough groups"):
        await client.open_group(TASK, size=2, timeout=0.1)
    waiting = asyncio.create_task(client.open_group(TASK, size=2))
    await first.abandon()
    group = await asyncio.wait_for(waiting, 20)
    assert group.view.index == 1
    assert len(await store.groups("run", Channel.TRAIN)) == 2


async def test_open_group_after_the_last_step_raises_run_finished(client: Client, store: SqliteStore) -> None:
    await store.claim_step("run", 1, [])
    await store.advance_step("run", 1, StepState.COMMITTED, version=1)
    with pytest.raises(RunFinished, match=r"trainer\.steps"):
        await client.open_group(TASK, size=2)


async def test_rejected_request_raises_gateway_error_with_its_code(client: Client) -> None:
    with pytest.raises(GatewayError, match="grp-missing") as raised:
        await client.get_group("grp-missing")
    assert (raised.value.status, raised.value.code) == (404, "group_not_found")
    with pytest.raises(GatewayError, match="'size' is 1; it must be at least 2"):
        await client.open_group(TASK, size=1)


async def test_unreachable_gateway_raises_engine_unavailable() -> None:
    async with Client("http://127.0.0.1:9", ADMIN_KEY, max_wait=0.1) as client:
        with pytest.raises(EngineUnavailable, match="did not respond to /groups"):
            await client.open_group(TASK, size=2)
