"""Tests for runs without a rollout, which train on groups that this process opens over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import pytest

from instar.client import Client, Group, Slot
from instar.errors import EngineUnavailable, RunFinished
from instar.trainer.monitor import read_steps
from tests.integration.group_runs import ADMIN_KEY, GroupRun, make_group_config
from tests.tiny import make_tiny_model
from tests.torture.run_process import WORKLOAD_MODULE, make_config
from tests.unit.test_learning import CHARACTERS_BY_KIND, MAX_TOKENS, MIN_FINAL_REWARD

LEARNING_STEPS = 60
LEARNING_GROUP_SIZE = 32


async def run_slot_over_http(http: aiohttp.ClientSession, slot: dict[str, Any], kind: str) -> None:
    """Ask for a reply, and complete the slot with the fraction of its characters of the requested kind."""
    headers = {"Authorization": f"Bearer {slot['api_key']}"}
    messages = [{"role": "user", "content": kind}]
    body = {"model": "instar", "messages": messages, "max_tokens": MAX_TOKENS}
    async with http.post(f"{slot['base_url']}/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        text = (await response.json())["choices"][0]["message"]["content"]
    reward = sum(char in CHARACTERS_BY_KIND[kind] for char in text) / max(1, len(text))
    completion = {"reward": reward}
    async with http.post(f"{slot['session_url']}/complete", json=completion, headers=headers) as response:
        assert response.status == 200, await response.text()


async def run_groups_over_http(url: str, kinds: list[str], size: int) -> None:
    """Open groups of these kinds in turn, until the run is finished."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with aiohttp.ClientSession() as http:
        number = 0
        while True:
            body = {"task": {"kind": kinds[number % len(kinds)]}, "size": size}
            try:
                async with http.post(f"{url}/groups", json=body, headers=headers) as response:
                    if response.status == 429:
                        await asyncio.sleep(0.05)  # shorter than Retry-After, which is meant for long steps
                        continue
                    if response.status == 409:
                        return
                    assert response.status == 201, await response.text()
                    group = await response.json()
            except aiohttp.ClientConnectionError:
                return
            async with asyncio.TaskGroup() as tasks:
                for slot in group["slots"]:
                    tasks.create_task(run_slot_over_http(http, slot, body["task"]["kind"]))
            number += 1


@pytest.mark.timeout(900)
async def test_random_model_learns_from_groups_over_http(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0, std=0.2)
    config = make_group_config(tmp_path, model, steps=LEARNING_STEPS, checkpoint_every=10)
    run = GroupRun(tmp_path, config)
    await asyncio.to_thread(run.start_serving)
    await run_groups_over_http(run.url, list(CHARACTERS_BY_KIND), LEARNING_GROUP_SIZE)
    await asyncio.to_thread(run.finish)
    run.assert_consistent()
    rewards = [record["reward_mean"] for record in read_steps(run.run_dir)]
    assert rewards[0] < 0.2
    assert mean(rewards[-3:]) > MIN_FINAL_REWARD, [round(reward, 2) for reward in rewards]


def make_scripted_config(folder: Path, model: Path, *, steps: int) -> dict[str, Any]:
    """Return the config of crash tests without the rollout. A rule scores the sessions."""
    config = make_config(folder, model, steps=steps)
    gateway = make_group_config(folder, model, steps=steps)["gateway"]
    reward = {"type": "rule", "function": f"{WORKLOAD_MODULE}:score_answer"}
    del config["rollout"]
    return {**config, "gateway": gateway, "reward": reward, "groups": {"group_policy": "refill"}}


async def complete_slot(slot: Slot, number: int) -> None:
    """Answer a tool result, which the scripted engine does with one of three numbers, without a reward."""
    headers = {"Authorization": f"Bearer {slot.api_key}"}
    messages = [{"role": "user", "content": f"say {number} result={number}"}]
    async with aiohttp.ClientSession() as http:
        async with http.post(
            f"{slot.base_url}/chat/completions",
            json={"model": "instar", "messages": messages},
            headers=headers,
        ) as response:
            assert response.status == 200, await response.text()
    await slot.complete()


async def complete_open_slots(group: Group, number: int) -> None:
    for slot in group.slots:
        if slot.is_open:
            await complete_slot(slot, number)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


async def wait_for_restarted_gateway(run: GroupRun, client: Client, group: Group) -> None:
    """Read the group from the gateway, which retries until the supervisor has restarted it."""
    assert await asyncio.to_thread(run.kill_role, "gateway")
    await group.refresh()
    assert (await client.get_group(group.group_id)).slots[1].is_open


@pytest.mark.timeout(400)
async def test_groups_survive_a_killed_gateway_and_a_killed_run(tmp_path: Path, model: Path) -> None:
    steps = 3
    run = GroupRun(tmp_path, make_scripted_config(tmp_path, model, steps=steps))
    await asyncio.to_thread(run.start_serving)
    async with Client(run.url, ADMIN_KEY, max_wait=90) as client:
        first = await client.open_group({"number": 0}, size=4)
        await complete_slot(first.slots[0], 0)
        await wait_for_restarted_gateway(run, client, first)
        await complete_open_slots(first, 0)
        second = await client.open_group({"number": 1}, size=4, deadline_s=600)
        await complete_slot(second.slots[0], 1)
        await asyncio.to_thread(run.kill_tree)
        await asyncio.to_thread(lambda: run.start_serving(resume=True))
        await second.refresh()
        assert [slot.is_open for slot in second.slots] == [False, True, True, True]
        await complete_open_slots(second, 1)
        number = 2
        while True:
            try:
                group = await client.open_group({"number": number}, size=4)
                await complete_open_slots(group, number)
            except (RunFinished, EngineUnavailable):
                break
            number += 1
    await asyncio.to_thread(run.finish)
    run.assert_consistent()
    sources = run.query("SELECT DISTINCT source, scorer FROM rewards")
    assert sources == [("rule", f"{WORKLOAD_MODULE}:score_answer")]
    counts = run.query(
        "SELECT g.group_id, COUNT(*) FROM groups g JOIN claims c USING (group_id) WHERE g.idx < 2 GROUP BY 1"
    )
    assert dict(counts) == {first.group_id: 4, second.group_id: 4}


@pytest.mark.timeout(300)
async def test_missed_deadline_is_refilled_and_training_continues(tmp_path: Path, model: Path) -> None:
    run = GroupRun(tmp_path, make_scripted_config(tmp_path, model, steps=1))
    await asyncio.to_thread(run.start_serving)
    async with Client(run.url, ADMIN_KEY) as client:
        group = await client.open_group({"number": 0}, size=4, deadline_s=2)
        expired = group.slots[0]
        for slot in group.slots[1:]:
            await complete_slot(slot, 0)
        async with asyncio.timeout(30):
            while group.slots[0].session_id == expired.session_id or not group.slots[0].is_open:
                await asyncio.sleep(0.05)
                await group.refresh()
        assert not (await expired.complete(reward=1.0)).changed
        await complete_slot(group.slots[0], 0)
        other = await client.open_group({"number": 1}, size=4)
        await complete_open_slots(other, 1)
    await asyncio.to_thread(run.finish)
    run.assert_consistent()
    superseded = run.query("SELECT session_id FROM claims WHERE reason = 'superseded'")
    assert superseded == [(expired.session_id,)]
