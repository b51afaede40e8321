"""Tests that foreign sessions, which name a group to which they do not belong, are never trained on."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from instar.data.batcher import Batcher
from instar.gateway.auth import create_key
from instar.http.auth import hash_key
from instar.types import Channel, Claim, ClaimOutcome, Group, GroupStatus, Session, SessionStatus
from tests.unit.data.builders import insert_session
from tests.unit.rollout.harness import RUN, RolloutHarness, make_config
from tests.unit.rollout.test_runner import run_once

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "attack"}], "max_tokens": 8}
ATTEMPT = 999
LOGGER = "instar.store.group_members"


class Attacker:
    """A second agent with its own key, which rates its own sessions."""

    def __init__(self, harness: RolloutHarness, http: httpx.AsyncClient, key: str) -> None:
        self._harness = harness
        self._http = http
        self._key = key
        self.session_ids: set[str] = set()

    async def post(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        return await self._http.post(path, json=body, headers={"Authorization": f"Bearer {key or self._key}"})

    async def attack(self, group: Group, slot: int) -> None:
        """Complete a session in the group's slot, or without a group if the gateway rejects that."""
        response = await self.post(
            "/sessions", {"group_id": group.group_id, "slot": slot, "attempt": ATTEMPT, "channel": "live"}
        )
        if response.status_code == 403:
            response = await self.post("/sessions", {})
        await self._finish(response.json()["session_id"], slot)

    async def write_session(self, group: Group, slot: int, **fields: Any) -> None:
        """Insert a session in the group's slot into the store, as an earlier version of the gateway allowed,
        and complete it."""
        session_id = f"sess-{group.group_id.replace('/', '-')}-{len(self.session_ids)}"
        session = Session(session_id, RUN, "attacker", RUN, Channel.LIVE)
        session = replace(session, group_id=group.group_id, slot=slot, attempt=ATTEMPT, **fields)
        await insert_session(self._harness.store, session, hash_key(session_id))
        await self._finish(session_id, slot, session_id)

    async def _finish(self, session_id: str, slot: int, key: str | None = None) -> None:
        self.session_ids.add(session_id)
        response = await self.post(f"/s/{session_id}/v1/chat/completions", REQUEST, key)
        assert response.status_code == 200, response.text
        for score in (10 - slot, 1000 - slot):
            await self.post("/feedback", {"session_id": session_id, "score": score}, key)
        await self.post(f"/sessions/{session_id}/complete", {}, key)


@pytest.fixture
async def attacker(harness: RolloutHarness) -> AsyncGenerator[Attacker]:
    async with httpx.AsyncClient(base_url=harness.gateway.url, timeout=30) as http:
        yield Attacker(harness, http, await create_key(harness.store, "agent", "attacker"))


async def train_on_all_groups(harness: RolloutHarness) -> list[Claim]:
    """Train a step on all groups and return its claims."""
    config = make_config(harness.folder)
    return (await harness.train_step(config, Batcher(harness.store, RUN, config), 1, 0)).claims


async def list_own_session_ids(harness: RolloutHarness) -> set[str]:
    """Return the ids of the rollout's sessions."""
    rows = await harness.store.sessions(RUN, channel=Channel.TRAIN)
    return {row.session.session_id for row in rows}


async def test_agent_key_cannot_add_sessions_to_a_training_group(
    harness: RolloutHarness, attacker: Attacker
) -> None:
    groups = await run_once(harness, harness.create_runner(make_config(harness.folder)))
    own_session_ids = await list_own_session_ids(harness)
    for group in groups:
        for slot in range(group.size + 4):
            await attacker.attack(group, slot)
    claims = await train_on_all_groups(harness)
    trained = {claim.session_id for claim in claims if claim.outcome is ClaimOutcome.TRAINED}
    assert trained & attacker.session_ids == set()
    assert {claim.session_id for claim in claims} == own_session_ids
    assert "superseded" not in {claim.reason for claim in claims}


async def test_group_loader_ignores_sessions_that_only_name_the_group(
    harness: RolloutHarness, attacker: Attacker, caplog: pytest.LogCaptureFixture
) -> None:
    groups = await run_once(harness, harness.create_runner(make_config(harness.folder)))
    own_session_ids = await list_own_session_ids(harness)
    for group in groups:
        await attacker.write_session(group, 0)
        await attacker.write_session(group, 1, agent_id="default")
        await attacker.write_session(group, 0, channel=Channel.TRAIN)
        await attacker.write_session(group, group.size, channel=Channel.TRAIN, agent_id="default")
        await attacker.write_session(group, -1, channel=Channel.TRAIN, agent_id="default")
    with caplog.at_level(logging.WARNING, LOGGER):
        claims = await train_on_all_groups(harness)
        await harness.store.group_sessions(groups, "default")
    assert {claim.session_id for claim in claims} == own_session_ids
    reports = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(reports) == len(attacker.session_ids), "each foreign session is reported once"
    assert all(any(session_id in report for report in reports) for session_id in attacker.session_ids)


async def test_late_foreign_session_is_not_claimed(harness: RolloutHarness, attacker: Attacker) -> None:
    config = make_config(harness.folder)
    groups = await run_once(harness, harness.create_runner(config))
    batcher = Batcher(harness.store, RUN, config)
    await harness.train_step(config, batcher, 1, 0)
    await attacker.write_session(groups[0], 0)
    for late_batcher in (batcher, Batcher(harness.store, RUN, config)):
        assert await late_batcher.next_batch(2, 0, 1, is_finished=lambda: True) is None
    assert attacker.session_ids.isdisjoint({claim.session_id for claim in await harness.store.claims(RUN)})


async def test_resumed_rollout_runs_slots_that_only_foreign_sessions_have_completed(
    harness: RolloutHarness, attacker: Attacker
) -> None:
    config = make_config(harness.folder)
    runner = harness.create_runner(config)
    group = Group(f"{RUN}/train/000000", RUN, Channel.TRAIN, 0, 2, runner.task_for(0))
    await harness.store.open_group(group)
    for slot in range(group.size):
        await attacker.write_session(group, slot)
    await run_once(harness, runner)
    sessions = [row.session for row in await harness.store.sessions(RUN, channel=Channel.TRAIN)]
    own_sessions = [session for session in sessions if session.group_id == group.group_id]
    assert sorted((session.slot, session.attempt, session.status) for session in own_sessions) == [
        (slot, 0, SessionStatus.COMPLETED) for slot in range(group.size)
    ]


async def test_evaluation_ignores_foreign_sessions(harness: RolloutHarness, attacker: Attacker) -> None:
    config = make_config(harness.folder)
    evaluator = harness.create_evaluator(config)
    metrics = await evaluator.evaluate("greedy", "before")
    for group in await harness.store.groups(RUN, Channel.VAL, GroupStatus.READY):
        await attacker.write_session(group, 0)
    repeated = await evaluator.evaluate("greedy", "before")
    assert repeated["accuracy"] == metrics["accuracy"]
