"""Tests of the gate's decisions about candidates, with a real store, renderer and rule."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from instar.live.base import StageOutcome
from instar.live.runner import GateRunner
from instar.live.sequential import get_candidate_alpha
from instar.types import PolicyStage
from tests.tiny import make_tiny_model
from tests.unit.data.test_live import POLICY
from tests.unit.live.harness import open_harness


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


async def test_better_candidate_is_promoted_without_a_person(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 60)
        await harness.add_candidate(1)
        await harness.run_gate()
        assert await harness.list_stages() == {1: "serving"}
        (evaluation,) = await harness.store.evaluations(POLICY)
        assert (evaluation.decision, evaluation.number) == ("promote", 1)
        assert evaluation.alpha == get_candidate_alpha(0.05, 1)
        assert evaluation.results["held_out"]["lower"] > 0
        assert evaluation.results["sanity"]["lower"] > -0.05
        assert evaluation.results["held_out"]["scored"] >= 30


async def test_worse_candidate_is_rejected_with_those_trained_from_it(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 60)
        await harness.add_candidate(1)
        await harness.run_gate()
        for version in (2, 3):
            await harness.add_candidate(version)
            if version == 2:
                gate = harness.create_gate()
                assert await gate.advance()  # begins the evaluation of version 2
        await harness.run_gate()
        assert await harness.list_stages() == {1: "serving", 2: "rejected", 3: "rejected"}
        assert await harness.list_decisions() == {1: "promote", 2: "reject"}
        (_, rejected) = await harness.store.evaluations(POLICY)
        assert "worse on held-out prompts" in rejected.reason
        assert rejected.alpha == get_candidate_alpha(0.05, 2)


async def test_candidate_that_fails_the_sanity_set_is_rejected_although_it_is_better(
    model: Path, tmp_path: Path
) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 60)
        for version in (1, 2, 3):
            await harness.add_candidate(version)
        await harness.run_gate()
        assert (await harness.list_stages())[3] == "rejected"
        assert "sanity set" in (await harness.store.evaluations(POLICY))[0].reason


async def test_candidate_with_few_held_out_prompts_waits_for_a_person(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path, deadline_days=1e-9) as harness:
        await harness.add_sessions(0, 12)
        await harness.add_candidate(1)
        gate = await harness.run_gate()
        (evaluation,) = await harness.store.evaluations(POLICY)
        assert evaluation.decision == "more data"
        assert "12 of 30 held-out prompts" in evaluation.reason
        assert gate.activity.startswith("version 1: 12 of 30 held-out prompts")
        assert await harness.list_stages() == {1: "candidate"}
        await harness.store.promote_version(POLICY, 1)
        assert await harness.list_stages() == {1: "serving"}


async def test_waiting_candidate_is_decided_when_more_prompts_arrive(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 20)
        await harness.add_candidate(1)
        gate = await harness.run_gate()
        await harness.add_sessions(20, 60)
        await harness.run_gate(gate)
        assert await harness.list_stages() == {1: "serving"}


async def test_undecided_candidate_is_superseded_by_a_newer_one(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 12)
        await harness.add_candidate(1)
        await harness.run_gate()
        await harness.add_candidate(2)
        await harness.run_gate()
        assert await harness.list_decisions() == {1: "superseded", 2: "more data"}
        assert await harness.list_stages() == {1: "candidate", 2: "candidate"}


async def test_candidate_without_improvement_is_rejected_after_max_items(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path, min_prompts=10, max_items=20) as harness:
        await harness.add_sessions(0, 40)
        for version in (1, 2):
            await harness.add_candidate(version)
        await harness.run_gate()
        assert await harness.list_stages() == {1: "candidate", 2: "rejected"}
        assert "no improvement on 20 held-out prompts" in (await harness.store.evaluations(POLICY))[0].reason


async def test_candidate_is_rejected_after_the_deadline(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path, min_prompts=10, deadline_days=1e-9) as harness:
        await harness.add_sessions(0, 12)
        for version in (1, 2):
            await harness.add_candidate(version)
        await harness.run_gate()
        assert (await harness.list_stages())[2] == "rejected"
        assert "no decision within" in (await harness.store.evaluations(POLICY))[0].reason


async def test_manual_mode_evaluates_and_leaves_the_decision_to_a_person(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path, mode="manual") as harness:
        await harness.add_sessions(0, 60)
        await harness.add_candidate(1)
        gate = await harness.run_gate()
        assert await harness.list_decisions() == {1: "promote"}
        assert await harness.list_stages() == {1: "candidate"}
        assert gate.activity == "version 1 waits for a person (promote)"
        gate_section = harness.config.live.gate.model_copy(update={"mode": "auto"})
        live = harness.config.live.model_copy(update={"gate": gate_section})
        harness.config = harness.config.model_copy(update={"live": live})
        await harness.run_gate()
        assert await harness.list_stages() == {1: "serving"}


async def test_candidate_that_cannot_be_loaded_is_superseded_by_a_newer_one(
    model: Path, tmp_path: Path
) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 12)
        await harness.add_candidate(1, artifact="live")  # a kind that engines cannot load
        gate = await harness.run_gate()
        assert gate.activity.startswith("version 1 cannot be evaluated now")
        await harness.add_candidate(2)
        await harness.run_gate(gate)
        assert await harness.list_decisions() == {1: "superseded", 2: "more data"}


async def test_uncommitted_candidate_is_not_evaluated(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_candidate(1, is_committed=False)
        gate = await harness.run_gate()
        assert gate.activity == "no candidate"
        assert await harness.store.evaluations(POLICY) == []


async def test_items_are_evaluated_once_by_gates_that_stop_after_every_piece_of_work(
    model: Path, tmp_path: Path
) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 60)
        await harness.add_candidate(1)
        while await harness.create_gate().advance():
            pass
        assert await harness.list_stages() == {1: "serving"}
        (evaluation,) = await harness.store.evaluations(POLICY)
        items = await harness.store.evaluation_items(POLICY, 1, 0)
        counts = {name: result["items"] for name, result in evaluation.results.items()}
        assert sum(counts.values()) == len(items)
        before = items[0]
        await harness.store.add_evaluation_item(replace(before, candidate_score=0.25))
        assert (await harness.store.evaluation_items(POLICY, 1, 0))[0] == before


async def test_evaluation_starts_again_if_another_version_is_served(model: Path, tmp_path: Path) -> None:
    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 60)
        for version in (1, 2):
            await harness.add_candidate(version)
        gate = harness.create_gate()
        for _ in range(4):
            await gate.advance()
        await harness.store.promote_version(POLICY, 1)
        await harness.run_gate(gate)
        evaluations = await harness.store.evaluations(POLICY)
        assert [(e.version, e.incumbent, e.decision) for e in evaluations] == [
            (2, 0, "more data"),
            (2, 1, "reject"),
        ]
        assert await harness.list_stages() == {1: "serving", 2: "rejected"}


async def test_stage_check_decides_about_shadow_and_canary(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, PolicyStage]] = []
    outcomes = {
        PolicyStage.SHADOW: StageOutcome("advance"),
        PolicyStage.CANARY: StageOutcome("wait", "3 of 20"),
    }

    async def check(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
        seen.append((version, stage))
        return outcomes[stage]

    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 60)
        await harness.add_candidate(1)
        gate = await harness.run_gate(harness.create_gate(check))
        assert seen == [(1, PolicyStage.SHADOW), (1, PolicyStage.CANARY)]
        assert await harness.list_stages() == {1: "canary"}
        assert gate.activity == "version 1 (canary): 3 of 20"
        await harness.add_candidate(2)
        await harness.run_gate(gate)
        assert await harness.list_stages() == {1: "canary", 2: "candidate"}, "one version at a time"
        outcomes[PolicyStage.CANARY] = StageOutcome("reject", "live rewards fell")
        await harness.run_gate(gate)
        assert await harness.list_stages() == {1: "rejected", 2: "rejected"}


async def test_canary_that_was_not_compared_with_the_serving_version_is_rejected(
    model: Path, tmp_path: Path
) -> None:
    async with open_harness(model, tmp_path) as harness:
        for version in (1, 2):
            await harness.add_candidate(version)
        await harness.store.advance_version(POLICY, 2, PolicyStage.CANARY, "by hand")
        await harness.run_gate()
        assert (await harness.list_stages())[2] == "rejected"


async def test_canary_is_rejected_if_a_person_promotes_another_version_during_its_check(
    model: Path, tmp_path: Path
) -> None:
    async with open_harness(model, tmp_path) as harness:

        async def promote_other(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
            if stage is PolicyStage.CANARY:
                await harness.store.promote_version(POLICY, 1)
            return StageOutcome("advance")

        await harness.add_sessions(0, 60)
        for version in range(1, 6):
            await harness.add_candidate(version)
        gate = harness.create_gate(promote_other)
        while (await harness.list_stages())[1] == "candidate":
            assert await gate.advance()
        assert (await harness.store.latest_policy(POLICY)).version == 1
        assert await gate.advance()
        assert (await harness.list_stages())[5] == "rejected"


async def test_feedback_is_compared_by_the_margin_of_liked_over_disliked_replies(
    model: Path, tmp_path: Path
) -> None:
    async with open_harness(model, tmp_path, min_prompts=5) as harness:
        settings = {"reward": {"type": "agent"}, "gateway": {"reward_range": [0, 1]}}
        harness.config = harness.config.model_validate(
            {**harness.config.model_dump(exclude_unset=True), **settings}
        )
        await harness.add_sessions(0, 20, rewards=(1.0, 0.0))
        await harness.add_candidate(1)
        await harness.run_gate()
        (evaluation,) = await harness.store.evaluations(POLICY)
        assert (evaluation.method, evaluation.decision) == ("feedback", "more data")
        items = [i for i in await harness.store.evaluation_items(POLICY, 1, 0) if i.set_name == "held_out"]
        assert [item.item_key for item in items][:2] == ["s000+s001", "s002+s003"]
        assert len(items) == 10
        assert all(item.candidate_score == item.incumbent_score is not None for item in items)


async def test_runner_pauses_while_evaluation_may_not_run_and_survives_engine_errors(
    model: Path, tmp_path: Path
) -> None:
    is_allowed = False

    async def may_run() -> bool:
        return is_allowed

    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 5)
        await harness.add_candidate(1)
        runner = GateRunner({POLICY: harness.create_gate()}, may_run=may_run)
        await run_briefly(runner)
        assert await harness.store.evaluations(POLICY) == []
        assert runner.activity == "waiting for a time at which evaluation may run"
        is_allowed = True
        await harness.engine.close()
        await run_briefly(runner)
        assert runner.activity.startswith("waiting for the engine")


async def test_canary_is_decided_while_no_evaluation_may_run(model: Path, tmp_path: Path) -> None:
    async def may_run() -> bool:
        return False

    async def reject(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
        return StageOutcome("reject", "live rewards fell")

    async def wait(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
        return StageOutcome("wait")

    async with open_harness(model, tmp_path) as harness:
        await harness.add_sessions(0, 60)
        await harness.add_candidate(1)
        await harness.run_gate(harness.create_gate(wait))
        assert await harness.list_stages() == {1: "shadow"}
        await run_briefly(GateRunner({POLICY: harness.create_gate(reject)}, may_run=may_run))
        assert await harness.list_stages() == {1: "rejected"}


async def run_briefly(runner: GateRunner) -> None:
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
