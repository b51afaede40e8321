"""Tests of `instar versions` on a run with candidates."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.store.base import EvaluationItem
from instar.store.factory import open_store
from instar.trainer.checkpoint import TrainerState, checkpoint_path
from instar.types import Artifact, Claim, ClaimOutcome, Policy, PolicyStage, StepState
from tests.unit.cli.conftest import Instar
from tests.unit.data.builders import RUN, put_test_run
from tests.unit.data.test_live import POLICY, add_live, make_live_config


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the folder of a run with three committed candidates, the first of which is served."""
    folder = tmp_path / "run"
    config = make_live_config().model_copy(update={"dir": folder})
    RunFolder(folder).create(config)

    async def fill() -> None:
        store = open_store(config)
        await put_test_run(store)
        for step in (1, 2, 3):
            await add_live(store, f"s{step}")
            claim = Claim(RUN, 0, f"s{step}/0", f"s{step}", None, ClaimOutcome.TRAINED, reward=1.0)
            await store.claim_step(POLICY, step, [claim], run_id=RUN)
            await store.reserve_version(POLICY, RUN, step, parent=step - 1, is_candidate=True)
            await store.publish(Policy(POLICY, step, Artifact("adapter", str(folder / f"v{step}"))))
            await store.advance_step(POLICY, step, StepState.COMMITTED, version=step)
            (folder / f"v{step}").mkdir()
            checkpoint_path(config.get_policy_dir(POLICY), step).mkdir(parents=True)
        await store.promote_version(POLICY, 1)
        await store.close()

    asyncio.run(fill())
    return folder


def list_stages(instar: Instar, run_dir: Path) -> dict[int, str]:
    return {row["version"]: row["stage"] for row in instar("versions", "ls", run_dir, "--json").json}


def test_promote_serves_the_newest_candidate_by_default(instar: Instar, run_dir: Path) -> None:
    assert list_stages(instar, run_dir) == {1: "serving", 2: "candidate", 3: "candidate"}
    assert instar("versions", "promote", run_dir, "--json").json == {"policy": POLICY, "serving": 3}
    assert list_stages(instar, run_dir) == {1: "retired", 2: "retired", 3: "serving"}
    result = instar("versions", "promote", run_dir)
    assert (result.code, result.err) == (1, "error: There are no candidates; see `instar versions ls`.\n")
    assert "serving: version 3" in instar("versions", "ls", run_dir).out


def test_reject_keeps_the_serving_version(instar: Instar, run_dir: Path) -> None:
    assert instar("versions", "reject", run_dir, "2", "--json").json == {"policy": POLICY, "rejected": [2, 3]}
    assert list_stages(instar, run_dir) == {1: "serving", 2: "rejected", 3: "rejected"}


def test_rollback_by_default_returns_to_the_version_served_before(instar: Instar, run_dir: Path) -> None:
    instar("versions", "promote", run_dir, "2")
    assert instar("versions", "rollback", run_dir, "--json").json == {
        "policy": POLICY,
        "serving": 4,
        "source": 1,
    }
    assert list_stages(instar, run_dir) == {1: "retired", 2: "retired", 3: "rejected", 4: "serving"}


def test_promote_of_a_candidate_without_files_is_refused(instar: Instar, run_dir: Path) -> None:
    (run_dir / "v2").rmdir()
    result = instar("versions", "promote", run_dir, "2")
    assert result.code == 1
    assert "The files of version 2 were removed, or its step has no checkpoint" in result.err
    assert list_stages(instar, run_dir)[1] == "serving"


def test_promote_without_a_checkpoint_needs_a_backend_that_loads_adapters(
    instar: Instar, run_dir: Path
) -> None:
    for step in (2, 3):
        checkpoint_path(RunFolder(run_dir).read_config().get_policy_dir(POLICY), step).rmdir()
    assert instar("versions", "promote", run_dir, "2", "--json").json == {"policy": POLICY, "serving": 2}
    config = RunFolder(run_dir).read_config()
    verl = RunConfig.model_validate({"backend": {"type": "verl"}}).backend
    RunFolder(run_dir).create(config.model_copy(update={"backend": verl}))
    assert "its step has no checkpoint" in instar("versions", "promote", run_dir, "3").err


def test_automatic_rollback_is_reported_until_the_next_promotion(instar: Instar, run_dir: Path) -> None:
    async def roll_back() -> None:
        store = open_store(RunFolder(run_dir).read_config())
        await store.promote_version(POLICY, 2)
        await store.roll_back(POLICY, RUN, 1, "live rewards fell after the promotion of version 2")
        await store.close()

    asyncio.run(roll_back())
    warning = (
        f"warning: {POLICY}@4 serves after an automatic rollback to version 1: live rewards fell after the "
        "promotion of version 2"
    )
    assert warning in " ".join(instar("versions", "ls", run_dir).out.split())
    assert warning in " ".join(instar("status", run_dir).out.split())
    instar("versions", "rollback", run_dir, "2")
    assert "warning" not in instar("versions", "ls", run_dir).out


def test_rollback_to_removed_files_is_refused(instar: Instar, run_dir: Path) -> None:
    instar("versions", "promote", run_dir, "2")
    (run_dir / "v1").rmdir()
    result = instar("versions", "rollback", run_dir, "1")
    assert result.code == 1
    assert "The files of version 1 were removed" in result.err
    assert "The last trainer.keep_checkpoints (2) candidates and promoted versions are kept" in result.err
    assert list_stages(instar, run_dir)[2] == "serving"


def test_show_lists_the_sessions_that_a_version_was_trained_on(instar: Instar, run_dir: Path) -> None:
    shown = instar("versions", "show", run_dir, "2", "--json").json
    assert (shown["parent"], shown["stage"], shown["is_served"]) == (1, "candidate", False)
    assert shown["trained_on"] == [
        {"session_id": "s2", "reward": 1.0, "advantage": None, "rejected_version": None}
    ]
    assert (shown["evaluation"], shown["evaluation_items"]) == (None, [])
    assert "trained on 1 session(s): s3" in instar("versions", "show", run_dir).out
    assert "Version 9 does not exist. Versions: 1, 2, 3" in instar("versions", "show", run_dir, "9").err


def test_evaluation_of_a_version_is_listed_and_shown(instar: Instar, run_dir: Path) -> None:
    async def evaluate() -> None:
        store = open_store(RunFolder(run_dir).read_config())
        evaluation = await store.begin_evaluation(POLICY, 3, 1, "rewards", lambda number: 0.03 / number)
        await store.add_evaluation_item(EvaluationItem(POLICY, 3, 1, "held_out", "s1", 0.0, 1.0))
        bounds = {"scored": 1, "difference": -1.0, "lower": -1.0, "upper": 0.9, "items": 1, "remaining": 0}
        results = {"held_out": bounds}
        evaluation = replace(evaluation, decision="reject", reason="worse", results=results)
        assert await store.record_evaluation(evaluation, PolicyStage.REJECTED)
        await store.close()

    asyncio.run(evaluate())
    listed = {row["version"]: row["evaluation"] for row in instar("versions", "ls", run_dir, "--json").json}
    assert listed[2] is None
    assert (listed[3]["decision"], listed[3]["alpha"], listed[3]["incumbent"]) == ("reject", 0.03, 1)
    assert "reject" in instar("versions", "ls", run_dir).out
    shown = instar("versions", "show", run_dir, "3", "--json").json
    assert shown["stage"] == "rejected"
    assert shown["trained_on"][0]["rejected_version"] == 3
    item = {"set_name": "held_out", "item_key": "s1", "candidate_score": 0.0, "incumbent_score": 1.0}
    assert shown["evaluation_items"] == [item]
    text = instar("versions", "show", run_dir, "3").out
    assert "evaluation 1: reject (worse)" in text
    assert "held_out: 1 items, difference -1.000 (at least -1.000, at most +0.900)" in text
    assert (
        "trained in step 3, 0 step(s) stale; version 3 was rejected"
        in instar("sessions", "show", run_dir, "s3").out
    )
    (claim,) = instar("sessions", "show", run_dir, "s3", "--json").json["claims"]
    assert claim["rejected_version"] == 3


def test_promote_in_a_run_without_live_data_is_refused(instar: Instar, run_dir: Path) -> None:
    RunFolder(run_dir).create(RunConfig.model_validate({"name": RUN, "dir": run_dir}))
    result = instar("versions", "promote", run_dir, "2")
    assert result.code == 1
    assert "there is nothing to promote, reject or roll back" in result.err


@pytest.fixture
def other_policy(run_dir: Path) -> str:
    """Add a second learning agent with one candidate, and return its policy."""
    config = RunFolder(run_dir).read_config()
    agents = {**config.agents, "B": config.agents["default"]}
    config = config.model_copy(update={"agents": agents})
    RunFolder(run_dir).create(config)
    policy_id = config.get_policy_id("B")

    async def fill() -> None:
        store = open_store(config)
        await add_live(store, "b1", agent_id="B")
        await store.claim_step(
            policy_id, 1, [Claim(RUN, 0, "b1/0", "b1", None, ClaimOutcome.TRAINED)], run_id=RUN
        )
        await store.reserve_version(policy_id, RUN, 1, parent=0, is_candidate=True)
        await store.publish(Policy(policy_id, 1, Artifact("adapter", str(run_dir))))
        await store.advance_step(policy_id, 1, StepState.COMMITTED, version=1)
        checkpoint_path(config.get_policy_dir(policy_id), 1).mkdir(parents=True)
        await store.close()

    asyncio.run(fill())
    return policy_id


def test_versions_of_several_agents_are_listed_together_and_changed_one_by_one(
    instar: Instar, run_dir: Path, other_policy: str
) -> None:
    rows = instar("versions", "ls", run_dir, "--json").json
    assert [(row["policy"], row["version"]) for row in rows] == [
        (POLICY, 1),
        (POLICY, 2),
        (POLICY, 3),
        (other_policy, 1),
    ]
    assert f"{other_policy}:" in instar("versions", "ls", run_dir).out
    result = instar("versions", "promote", run_dir)
    assert result.code != 0
    assert "--agent: this run trains a policy for each learning agent; choose one of default, B" in result.err
    assert (
        "the agents that learn in this run are default, B"
        in instar("versions", "promote", run_dir, "--agent", "watched").err
    )
    promoted = instar("versions", "promote", run_dir, "--agent", "B", "--json").json
    assert promoted == {"policy": other_policy, "serving": 1}
    rows = instar("versions", "ls", run_dir, "--agent", "default", "--json").json
    assert [row["stage"] for row in rows] == ["serving", "candidate", "candidate"]
    shown = instar("versions", "show", run_dir, "--agent", "B", "--json").json
    assert [claim["session_id"] for claim in shown["trained_on"]] == ["b1"]


def test_plan_of_several_agents_shows_the_next_step_of_each(
    instar: Instar, run_dir: Path, other_policy: str
) -> None:
    config = RunFolder(run_dir).read_config()
    for policy_id, step in ((POLICY, 3), (other_policy, 1)):
        checkpoint = checkpoint_path(config.get_policy_dir(policy_id), step)
        (checkpoint / "trainer.json").write_bytes(msgspec.json.encode(TrainerState(step, 0.0)))
    plans = instar("plan", run_dir, "--json").json
    assert [(plan["policy_id"], plan["step"], plan["version"]) for plan in plans] == [
        (POLICY, 4, 3),
        (other_policy, 2, 1),
    ]
    assert [live["session_id"] for live in plans[1]["live_sessions"]] == ["b1"]
    assert instar("plan", run_dir, "--agent", "B", "--json").json == plans[1]
    output = instar("plan", run_dir).out
    assert "default: step 4 (from version 3)" in output
    assert "B: step 2 (from version 1)" in output


def test_forget_lists_the_policy_that_was_trained_on_a_session(
    instar: Instar, run_dir: Path, other_policy: str
) -> None:
    trained = instar("forget", run_dir, "b1", "--yes", "--json").json["trained"]
    assert [(row["policy_id"], row["version"]) for row in trained] == [(other_policy, 1)]
