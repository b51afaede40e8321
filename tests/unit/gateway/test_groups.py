"""Groups from outside: opening, keys, deadlines, refills, admission, abandoning and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from instar.config import GatewayConfig, ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.base import GroupView, SlotView
from instar.record.base import Renderer
from instar.types import Channel, Group, GroupStatus, SessionStatus, StepState, Task
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway, run_gateway
from tests.unit.gateway.test_sessions import get_error

TASK = {"question": "2 + 2"}


def make_run_config(trainer: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """Return the config of a run that may have two groups ahead of the trainer."""
    settings = {"mode": "sync", "groups_per_step": 2, "steps": 5, **(trainer or {})}
    return RunConfig.model_validate({"name": "run", "trainer": settings, "groups": {}, **sections})


async def open_group(gateway: RunningGateway, size: int = 2, **fields: Any) -> GroupView:
    response = await gateway.post_json("/groups", {"task": TASK, "size": size, **fields})
    assert response.status_code == 201, response.text
    return msgspec.json.decode(response.content, type=GroupView)


async def get_group(gateway: RunningGateway, group_id: str) -> GroupView:
    response = await send(gateway, "GET", f"/groups/{group_id}")
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=GroupView)


async def send(gateway: RunningGateway, method: str, path: str, **headers: str) -> httpx.Response:
    return await gateway.http.request(
        method, path, headers={"Authorization": f"Bearer {ADMIN_KEY}", **headers}
    )


async def wait_for_group(
    gateway: RunningGateway, group_id: str, condition: Callable[[GroupView], bool]
) -> GroupView:
    async with asyncio.timeout(20):
        while not condition(group := await get_group(gateway, group_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return group


async def end_slot(gateway: RunningGateway, slot: SlotView, action: str = "complete", **body: Any) -> None:
    assert slot.api_key is not None
    response = await gateway.post_json(f"/sessions/{slot.session_id}/{action}", body, slot.api_key)
    assert response.status_code == 200, response.text


async def call_model(slot: SlotView, text: str = "hi", **options: Any) -> str | None:
    assert slot.api_key is not None
    async with openai.AsyncOpenAI(base_url=slot.base_url, api_key=slot.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(
            model="instar", messages=[{"role": "user", "content": text}], **options
        )
    return reply.choices[0].message.content


async def test_open_group_returns_a_train_session_for_each_slot(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    group = await open_group(gateway, 3, task_id="sum", deadline_s=60)
    assert (group.status, group.size, group.task_id, group.task) == (GroupStatus.OPEN, 3, "sum", TASK)
    assert [slot.slot for slot in group.slots] == [0, 1, 2]
    assert len({slot.api_key for slot in group.slots}) == 3
    for slot in group.slots:
        assert 0 < slot.expires_at - group.created_at <= 61
        session = await gateway.store.session(slot.session_id)
        assert session is not None
        assert (session.channel, session.group_id, session.task_id) == (Channel.TRAIN, group.group_id, "sum")
    assert await get_group(gateway, group.group_id) == group


async def test_open_group_without_task_id_gives_equal_tasks_equal_ids(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    first, second = (
        await open_group(gateway, task={"a": 1, "b": 2}),
        await open_group(gateway, task={"b": 2, "a": 1}),
    )
    assert first.task_id == second.task_id
    assert (first.index, second.index) == (0, 1)
    assert first.group_id != second.group_id


async def test_slot_base_urls_record_calls_of_every_client(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    slot = (await open_group(gateway)).slots[0]
    assert await call_model(slot) == "You said: hi"
    assert slot.api_key is not None
    async with openai.AsyncOpenAI(base_url=slot.base_urls["responses"], api_key=slot.api_key) as client:
        await client.responses.create(model="instar", input="hello")
    async with anthropic.AsyncAnthropic(base_url=slot.base_urls["messages"], api_key=slot.api_key) as claude:
        await claude.messages.create(
            model="instar", max_tokens=50, messages=[{"role": "user", "content": "good day"}]
        )
    calls = await gateway.store.calls(slot.session_id)
    assert [call.dialect for call in calls] == ["chat", "responses", "messages"]


async def test_slots_of_agents_with_equal_seeds_are_sampled_differently(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    group = await open_group(gateway, 4)
    assert len({await call_model(slot, "seed", seed=7) for slot in group.slots}) == 4


async def test_slot_key_cannot_use_another_slot(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    own, other = (await open_group(gateway)).slots
    assert own.api_key is not None
    path = f"/sessions/{other.session_id}"
    for action, body in (("complete", {"reward": 1}), ("fail", {"reason": "x"})):
        response = await gateway.post_json(f"{path}/{action}", body, own.api_key)
        assert get_error(response) == (403, "wrong_session")
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    response = await gateway.post_json(f"/s/{other.session_id}/v1/chat/completions", chat, own.api_key)
    assert get_error(response) == (403, "session_conflict")
    opened = await gateway.post_json("/sessions", {"channel": "train"}, own.api_key)
    assert get_error(opened) == (403, "not_allowed")


@pytest.mark.parametrize(("reward", "status"), [("agent", GroupStatus.READY), ("rule", GroupStatus.SCORING)])
async def test_group_closes_when_all_slots_have_ended(
    start_gateway: StartGateway, reward: str, status: GroupStatus
) -> None:
    section: dict[str, Any] = {"type": reward} | ({"function": "m:f"} if reward == "rule" else {})
    gateway = await start_gateway(run_config=make_run_config(reward=section))
    group = await open_group(gateway)
    await end_slot(gateway, group.slots[0], reward=0.5)
    view = await get_group(gateway, group.group_id)
    assert view.status is GroupStatus.OPEN
    assert (view.slots[0].reward, view.slots[0].api_key) == (0.5, None)
    await end_slot(gateway, group.slots[1])
    view = await wait_for_group(gateway, group.group_id, lambda view: view.status is not GroupStatus.OPEN)
    assert view.status is status
    assert [slot.status for slot in view.slots] == [SessionStatus.COMPLETED] * 2


async def test_failed_slot_under_refill_gets_a_new_attempt_with_another_key(
    start_gateway: StartGateway,
) -> None:
    config = make_run_config(groups={"group_policy": "refill", "refills": 1})
    gateway = await start_gateway(run_config=config)
    group = await open_group(gateway)
    first = group.slots[0]
    await end_slot(gateway, first, "fail", reason="crashed")
    view = await wait_for_group(gateway, group.group_id, lambda view: view.slots[0].attempt == 1)
    second = view.slots[0]
    assert second.status is SessionStatus.OPEN
    assert second.session_id != first.session_id
    assert second.api_key not in (None, first.api_key)
    assert await call_model(second) == "You said: hi"
    with pytest.raises(openai.APIStatusError, match="has ended"):
        await call_model(first)
    await end_slot(gateway, second, "fail", reason="crashed again")
    await end_slot(gateway, group.slots[1])
    view = await wait_for_group(gateway, group.group_id, lambda view: view.status is GroupStatus.READY)
    assert [(slot.attempt, slot.status, slot.reason) for slot in view.slots] == [
        (1, SessionStatus.FAILED, "crashed again"),
        (0, SessionStatus.COMPLETED, None),
    ]


async def test_group_with_failed_slot_is_dropped_under_drop(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config(groups={"group_policy": "drop"}))
    group = await open_group(gateway)
    await end_slot(gateway, group.slots[0], "fail", reason="crashed")
    await end_slot(gateway, group.slots[1])
    view = await wait_for_group(gateway, group.group_id, lambda view: view.status is GroupStatus.DROPPED)
    assert view.reason == "session_failed"


@pytest.mark.parametrize("policy", ["keep", "refill"])
async def test_slot_that_misses_its_deadline_fails(start_gateway: StartGateway, policy: str) -> None:
    config = make_run_config(groups={"group_policy": policy, "refills": 1})
    gateway = await start_gateway(run_config=config)
    group = await open_group(gateway, deadline_s=0.3)
    await end_slot(gateway, group.slots[1])
    view = await wait_for_group(gateway, group.group_id, lambda view: view.status is GroupStatus.READY)
    assert [(slot.attempt, slot.status) for slot in view.slots] == [
        (1 if policy == "refill" else 0, SessionStatus.FAILED),
        (0, SessionStatus.COMPLETED),
    ]
    assert view.slots[0].reason == "the session was not completed within 0.3 s"
    with pytest.raises(openai.APIStatusError, match="has ended"):
        await call_model(group.slots[0])


async def test_open_group_ahead_of_training_gets_429_until_a_group_is_abandoned(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    groups = [await open_group(gateway) for _ in range(2)]
    response = await gateway.post_json("/groups", {"task": TASK, "size": 2})
    assert get_error(response) == (429, "too_many_groups")
    assert int(response.headers["retry-after"]) > 0
    abandoned = await send(gateway, "DELETE", f"/groups/{groups[0].group_id}")
    assert abandoned.json()["status"] == "dropped"
    assert (await open_group(gateway)).index == 2


async def test_concurrent_requests_never_exceed_admission(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    requests = [gateway.post_json("/groups", {"task": {"n": n}, "size": 2}) for n in range(8)]
    statuses = sorted([response.status_code for response in await asyncio.gather(*requests)])
    assert statuses == [201] * 2 + [429] * 6


async def test_open_group_after_the_last_step_gets_409(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config({"steps": 1}))
    await gateway.store.claim_step("run", 1, [])
    await gateway.store.advance_step("run", 1, StepState.COMMITTED, version=1)
    response = await gateway.post_json("/groups", {"task": TASK, "size": 2})
    assert get_error(response) == (409, "run_finished")


async def test_abandoned_group_ends_its_sessions(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    group = await open_group(gateway)
    await call_model(group.slots[0])
    for _ in range(2):  # a repeated request changes nothing
        response = await send(gateway, "DELETE", f"/groups/{group.group_id}")
        view = msgspec.json.decode(response.content, type=GroupView)
        assert (view.status, view.reason) == (GroupStatus.DROPPED, "abandoned")
    assert {slot.status for slot in view.slots} == {SessionStatus.ABANDONED}
    for slot in group.slots:
        with pytest.raises(openai.APIStatusError, match="has ended"):
            await call_model(slot)


async def test_abandoning_a_closed_group_gets_409(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    group = await open_group(gateway)
    for slot in group.slots:
        await end_slot(gateway, slot)
    await wait_for_group(gateway, group.group_id, lambda view: view.status is GroupStatus.READY)
    response = await send(gateway, "DELETE", f"/groups/{group.group_id}")
    assert get_error(response) == (409, "group_closed")


async def test_retried_request_with_idempotency_key_returns_the_same_group(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(run_config=make_run_config())

    async def post(task: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Idempotency-Key": "job-7"}
        return await gateway.http.post("/groups", json={"task": task, "size": 2}, headers=headers)

    first, second = await post(TASK), await post(TASK)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    assert get_error(await post({"question": "another"})) == (409, "conflict")


async def test_restarted_gateway_continues_open_groups(
    start_gateway: StartGateway, model: ModelConfig, renderer: Renderer
) -> None:
    config = make_run_config()
    gateway = await start_gateway(run_config=config)
    group = await open_group(gateway)
    await call_model(group.slots[0])
    await end_slot(gateway, group.slots[0], reward=1)
    engine = ScriptedEngine(model, ScriptedEngineConfig(function="tests.unit.gateway.scripts:reply"))
    async with run_gateway(
        gateway.store_path, engine, renderer, GatewayConfig(), run_config=config
    ) as restarted:
        view = await get_group(restarted, group.group_id)
        assert view.slots[1].api_key == group.slots[1].api_key
        await end_slot(restarted, group.slots[1], reward=0)
        await wait_for_group(restarted, group.group_id, lambda view: view.status is GroupStatus.READY)


async def test_group_that_a_rollout_left_open_is_dropped_at_start(start_gateway: StartGateway) -> None:
    config = make_run_config()
    first = await start_gateway()
    group = Group("run/train/000000", "run", Channel.TRAIN, 0, 2, Task("t", {}))
    await first.store.open_group(group)
    gateway = await start_gateway(run_config=config)
    async with asyncio.timeout(20):
        while not await gateway.store.groups("run", Channel.TRAIN, GroupStatus.DROPPED):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert get_error(await send(gateway, "GET", "/groups/run%2Ftrain%2F000000"))[0] == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"task": TASK}, "size"),
        ({"size": 2}, "task"),
        ({"task": TASK, "size": 0}, "size"),
        ({"task": TASK, "size": 1}, "size"),
        ({"task": TASK, "size": 2, "deadline_s": 0}, "deadline_s"),
        ({"task": TASK, "size": 2, "deadline": 9}, "deadline"),
        ({"task": "text", "size": 2}, "task"),
    ],
)
async def test_invalid_group_request_gets_400_with_the_field(
    start_gateway: StartGateway, body: dict[str, Any], param: str
) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    response = await gateway.post_json("/groups", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_group_of_one_is_accepted_if_the_estimator_allows_it(start_gateway: StartGateway) -> None:
    config = make_run_config({"advantage": {"estimator": "running"}})
    gateway = await start_gateway(run_config=config)
    assert len((await open_group(gateway, 1)).slots) == 1


async def test_gateway_of_a_run_with_a_rollout_rejects_groups(gateway: RunningGateway) -> None:
    response = await gateway.post_json("/groups", {"task": TASK, "size": 2})
    assert get_error(response) == (409, "groups_not_accepted")


async def test_unknown_group_gets_404(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    for method in ("GET", "DELETE"):
        assert get_error(await send(gateway, method, "/groups/grp-x")) == (404, "group_not_found")


async def test_secret_in_a_task_is_redacted(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(run_config=make_run_config())
    secret = "sk-ant-api03-" + "a1B2" * 20
    group = await open_group(gateway, task={"note": f"use {secret}"})
    stored = await gateway.store.group(group.group_id)
    assert stored is not None
    assert secret not in stored.task.data["note"]
