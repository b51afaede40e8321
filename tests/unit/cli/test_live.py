"""Tests for what `plan` and `sessions show` say about live sessions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from instar.cli.train import find_newest_policy
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.store.base import SessionRecord
from instar.store.factory import open_store
from instar.types import (
    Artifact,
    Channel,
    Claim,
    ClaimOutcome,
    Group,
    GroupStatus,
    Policy,
    SessionStatus,
    StepState,
    Task,
)
from tests.unit.cli.conftest import Instar
from tests.unit.data.builders import RUN, make_session, put_test_run
from tests.unit.data.test_live import POLICY, add_live, make_live_config
from tests.unit.live.prompts import list_prompts
from tests.versions import publish_serving


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = make_live_config(groups_per_step=2).model_copy(update={"dir": tmp_path / "run"})
    RunFolder(config.run_dir).create(config)

    async def fill() -> None:
        store = open_store(config)
        await put_test_run(store)
        await add_live(store, "trained", ended=1)
        claim = Claim(RUN, 0, "trained/0", "trained", None, ClaimOutcome.TRAINED)
        await store.claim_step(POLICY, 1, [claim], run_id=RUN)
        await add_live(store, "first", 1.0, ended=2)
        await add_live(store, "watched", agent_id="watched", ended=2)
        await add_live(store, "open", status=SessionStatus.OPEN)
        await add_live(store, "third", 1.0, ended=4)
        await add_live(store, "second", 0.0, ended=3)
        task, status = Task("task", {}), GroupStatus.SCORING
        group = Group("resampled/first", RUN, Channel.RESAMPLED, 0, 1, task, status)
        copy = make_session("copy", channel=Channel.RESAMPLED, group_id=group.group_id)
        await store.put_records([group], [SessionRecord(replace(copy, status=SessionStatus.COMPLETED))])
        await store.close()

    asyncio.run(fill())
    return config


def test_plan_says_for_every_live_session_whether_it_is_included(instar: Instar, config: RunConfig) -> None:
    plan = instar("plan", config.run_dir, "--json").json
    assert (plan["step"], plan["ready"], plan["report"]["samples"]) == (2, True, 2)
    assert [(live["session_id"], live["reason"], live["advantage"]) for live in plan["live_sessions"]] == [
        ("second", "included", -1.0),
        ("third", "waits for a later step, because sessions that ended earlier come first", None),
        ("open", "excluded: the session is not complete", None),
        ("watched", "excluded: its agent's mode is observe; set `agents.NAME.mode` to learn", None),
        ("first", "included", 1.0),
        ("trained", "already trained in step 1", None),
    ]
    output = instar("plan", config.run_dir).out
    assert "default: step 2 (from version 0) would train on 2 samples" in output
    assert "already trained in step 1" in output


def test_plan_after_a_rejection_continues_from_the_serving_version(instar: Instar, config: RunConfig) -> None:
    async def reject_candidate() -> None:
        store = open_store(config)
        version = await store.reserve_version(POLICY, RUN, 1, parent=0, is_candidate=True)
        await store.publish(Policy(POLICY, version, Artifact("adapter", "/none")))
        await store.advance_step(POLICY, 1, StepState.SUBMITTED, version=version)
        await store.reject_version(POLICY, version, "worse")
        await store.close()

    asyncio.run(reject_candidate())
    plan = instar("plan", config.run_dir, "--json").json
    assert (plan["step"], plan["version"]) == (3, 0), "step 2 loads the serving version"
    reasons = {row["session_id"]: (row["reason"], row["rejected_version"]) for row in plan["live_sessions"]}
    assert reasons["trained"] == ("already trained in step 1; version 1 was rejected", 1)
    assert reasons["first"] == ("included", None)


def test_held_out_session_is_neither_planned_nor_exported_by_default(
    instar: Instar, config: RunConfig, tmp_path: Path
) -> None:
    async def add_held_out() -> None:
        store = open_store(config)
        await add_live(store, "held", call={"messages": tuple(next(list_prompts()))})
        await store.close()

    asyncio.run(add_held_out())
    plan = instar("plan", config.run_dir, "--json").json
    (reason,) = [row["reason"] for row in plan["live_sessions"] if row["session_id"] == "held"]
    assert reason in ("dropped: held_out", "excluded: it is held out to evaluate candidates (live.gate)")
    for options, expected in (((), False), (("--held-out",), True)):
        folder = tmp_path / f"export-{expected}"
        instar("sessions", "export", config.run_dir, "--to", folder, *options)
        assert ('"held"' in (folder / "sessions.jsonl").read_text()) is expected


@pytest.mark.parametrize(
    ("session_id", "line"),
    [
        ("copy", "not claimed yet: the session's group is being scored"),
        ("trained", "sample trained/0: advantage none → trained in step 1, 0 step(s) stale"),
        ("first", "not claimed yet: the session waits for a step"),
        ("watched", "not claimed: its agent's mode is observe; set `agents.NAME.mode` to learn"),
        ("open", "not claimed: the session is not complete"),
    ],
)
def test_sessions_show_says_why_a_live_session_is_not_claimed(
    instar: Instar, config: RunConfig, session_id: str, line: str
) -> None:
    assert line in instar("sessions", "show", config.run_dir, session_id).out


def test_newest_policy_is_the_serving_version_of_a_learning_agent(config: RunConfig) -> None:
    async def promote() -> Policy | None:
        store = open_store(config)
        await publish_serving(store, POLICY, RUN, Artifact("adapter", str(config.run_dir)))
        await store.close()
        return await find_newest_policy(config.run_dir)

    policy = asyncio.run(promote())
    assert policy is not None
    assert str(policy.ref) == f"{POLICY}@1"


def test_sessions_show_in_a_run_on_rollouts_names_the_setting(instar: Instar, config: RunConfig) -> None:
    RunFolder(config.run_dir).create(RunConfig.model_validate({"name": RUN, "dir": config.run_dir}))
    output = instar("sessions", "show", config.run_dir, "first").out
    assert "not claimed: this run does not train on live sessions (see `data`)" in output


def test_plan_shows_what_is_replayed_and_its_share(instar: Instar, config: RunConfig) -> None:
    async def promote_trained_session() -> None:
        store = open_store(config)
        version = await store.reserve_version(POLICY, RUN, 1, parent=0, is_candidate=True)
        await store.publish(Policy(POLICY, version, Artifact("adapter", "/none")))
        await store.advance_step(POLICY, 1, StepState.SUBMITTED, version=version)
        await store.write(lambda db: db.execute("UPDATE policies SET stage = 'serving'"))
        await store.write(lambda db: db.execute("UPDATE claims SET advantage = 1"))
        await store.close()

    asyncio.run(promote_trained_session())
    settings = config.model_dump(mode="json", exclude_unset=True)
    changed = RunConfig.model_validate({**settings, "live": {"replay": {"share": 0.5, "reference": None}}})
    RunFolder(config.run_dir).create(changed)
    plan = instar("plan", config.run_dir, "--json").json
    assert [claim["session_id"] for claim in plan["replayed"]] == ["trained"]
    assert plan["replay_share"] == pytest.approx(1 / 3)
    reasons = {live["session_id"]: live["reason"] for live in plan["live_sessions"]}
    assert reasons["trained"] == "already trained in step 1; it would be replayed"
    output = " ".join(instar("plan", config.run_dir).out.split())
    assert "1 earlier replies would be replayed (33% of the step): 1 from live sessions, 0 from" in output
