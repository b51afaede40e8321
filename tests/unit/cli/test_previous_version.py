"""Tests that runs recorded by the previous version can still be read."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from instar.cli.run_store import open_run_store
from instar.cluster.layout import RunFolder
from instar.gateway.app import HASH_KEY_NAME
from instar.record.hashing import MessageHasher
from instar.store.base import Store
from instar.trainer.checkpoint import checkpoint_path, read_trainer_state
from instar.types import Artifact, CallStatus, Channel, GroupStatus, Link, SessionStatus, StepState
from tests.previous_version import CORRECTED_ID, RATED_ID, RUN_ID, UNTRAINABLE_ID, copy_previous_run
from tests.unit.cli.conftest import Instar

T = TypeVar("T")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return copy_previous_run(tmp_path / "copy")


def read_store(run_dir: Path, read: Callable[[Store], Awaitable[T]]) -> T:
    async def open_and_read() -> T:
        async with open_run_store(run_dir) as (_, store):
            return await read(store)

    return asyncio.run(open_and_read())


def test_previous_store_has_its_sessions_calls_and_rewards(run_dir: Path) -> None:
    async def read(store: Store) -> None:
        rows = await store.sessions(RUN_ID)
        session_ids = [row.session.session_id for row in rows]
        assert len(session_ids) == 32
        assert {row.session.status for row in rows} == {SessionStatus.COMPLETED}
        assert {(row.call_count, row.sampled_tokens) for row in rows} == {(2, 8)}
        calls = await store.calls_by_session(session_ids)
        links = {tuple(call.link for call in calls[session_id]) for session_id in session_ids}
        assert links == {(Link.ROOT, Link.EXTENDS)}
        statuses = {call.status for session_id in session_ids for call in calls[session_id]}
        assert statuses == {CallStatus.OK}
        rewards = await store.rewards_by_session(session_ids)
        counts = Counter(reward.scorer for session_id in session_ids for reward in rewards[session_id])
        assert counts == {"previous_run:score": 32, "feedback": 1}
        assert rewards[RATED_ID][-1].value == 1.0
        assert await store.score_counts(RUN_ID) == {"previous_run:score": {"scored": 32}}

    read_store(run_dir, read)


def test_previous_store_has_its_feedback_and_tags(run_dir: Path) -> None:
    async def read(store: Store) -> None:
        correction, rating = await store.feedback(RUN_ID)
        assert (correction.session_id, correction.correction, correction.author) == (
            CORRECTED_ID,
            "Thirteen.",
            "ann",
        )
        assert correction.correction_ids is not None
        assert (rating.session_id, rating.thumbs) == (RATED_ID, 1)
        tags = await store.tags([CORRECTED_ID, RATED_ID, UNTRAINABLE_ID])
        values = {session_id: [(tag.name, tag.value) for tag in tags[session_id]] for session_id in tags}
        assert values == {
            CORRECTED_ID: [("topic", "numbers")],
            RATED_ID: [("topic", "numbers")],
            UNTRAINABLE_ID: [("untrainable", "")],
        }

    read_store(run_dir, read)


def test_previous_store_has_its_steps_claims_and_policies(run_dir: Path) -> None:
    async def read(store: Store) -> list[Artifact]:
        run = await store.run(RUN_ID)
        assert run is not None
        assert run.status == "stopped"
        steps = await store.steps(RUN_ID)
        assert [(step.step, step.state, step.version) for step in steps] == [
            (1, StepState.COMMITTED, 1),
            (2, StepState.COMMITTED, 2),
        ]
        claims = await store.claims(RUN_ID)
        assert Counter((claim.outcome, claim.step) for claim in claims) == {
            ("trained", 1): 8,
            ("trained", 2): 8,
        }
        unclaimed = await store.groups(RUN_ID, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=0)
        assert len(unclaimed) == 4
        policies = await store.published_policies(RUN_ID)
        assert [(policy.version, step) for policy, step in policies] == [(1, 1), (2, 2)]
        return [policy.artifact for policy, _ in policies]

    artifacts = read_store(run_dir, read)
    assert all(artifact.path and Path(artifact.path).is_dir() for artifact in artifacts)
    assert read_trainer_state(checkpoint_path(run_dir, 2)).step == 2


def test_previous_settings_with_the_source_live_are_read_as_rollout(run_dir: Path) -> None:
    assert json.loads((run_dir / "config.json").read_bytes())["data"][0]["source"] == "live"
    assert [section.source for section in RunFolder(run_dir).read_config().data] == ["rollout"]


def test_previous_settings_without_data_are_read_as_rollout(run_dir: Path) -> None:
    """The first versions had no setting `data`."""
    file = run_dir / "config.json"
    settings = json.loads(file.read_bytes())
    file.write_text(json.dumps({name: value for name, value in settings.items() if name != "data"}))
    assert [section.source for section in RunFolder(run_dir).read_config().data] == ["rollout"]


def test_message_hashes_match_those_of_the_previous_version(run_dir: Path) -> None:
    """Otherwise, sessions of the previous version could not be continued."""

    async def read(store: Store) -> None:
        hasher = MessageHasher(await store.secret(HASH_KEY_NAME))
        first, second = await store.calls(CORRECTED_ID)
        for call, start in ((first, 0), (second, len(first.messages) + 1)):
            assert call.reply is not None
            chain = hasher.hash_messages([*call.messages, call.reply], call.tools)
            assert call.digests == chain.pack(start)

    read_store(run_dir, read)


def test_reading_command_does_not_migrate_the_store_of_a_run_in_progress(
    instar: Instar, run_dir: Path
) -> None:
    descriptor = RunFolder(run_dir).lock("supervisor")
    result = instar("sessions", "ls", run_dir, "--json")
    os.close(descriptor)
    assert result.code == 1
    assert "is already running in another process" in result.err


def test_commands_read_the_previous_run(instar: Instar, run_dir: Path) -> None:
    assert len(instar("sessions", "ls", run_dir, "--json").json) == 32
    assert len(instar("sessions", "ls", run_dir, "--json", "--tag", "topic=numbers").json) == 2
    output = instar("sessions", "show", run_dir, CORRECTED_ID).out
    assert "call 2 · extends · 41 prompt + 4 sampled tokens" in output
    assert "trained in step 1, 0 step(s) stale" in output
    assert len(instar("feedback", run_dir, "ls", "--json").json) == 2
    plan = instar("plan", run_dir, "--json").json
    assert (plan["step"], plan["version"], plan["ready"], plan["groups_waiting"]) == (
        3,
        2,
        True,
        {"ready": 4},
    )
    outcomes = {
        sample["session_id"]: (sample["outcome"], sample["reason"])
        for group in plan["groups"]
        for sample in group["samples"]
    }
    assert outcomes[UNTRAINABLE_ID] == ("dropped", "untrainable")
    assert outcomes[RATED_ID] == ("trained", None)
    assert instar("report", run_dir).code == 0
    assert (run_dir / "report" / "index.html").is_file()
