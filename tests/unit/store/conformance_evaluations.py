"""Conformance tests for the evaluations of candidates."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from instar.store.base import EvaluationItem, Store
from instar.types import Artifact, Policy, PolicyStage, StepState

from .factories import POLICY_ID, RUN_ID


async def add_candidates(store: Store, *versions: int) -> None:
    for version in versions:
        await store.reserve_version(POLICY_ID, RUN_ID, version, parent=version - 1, is_candidate=True)
        await store.claim_step(POLICY_ID, version, [], run_id=RUN_ID)
        await store.publish(Policy(POLICY_ID, version, Artifact("adapter", f"/policies/{version}")))
        await store.advance_step(POLICY_ID, version, StepState.COMMITTED, version=version)


async def list_stages(store: Store) -> dict[int, PolicyStage]:
    return {row.policy.version: row.stage for row in await store.policy_versions(POLICY_ID)}


class EvaluationTests:
    async def test_evaluations_that_begin_at_the_same_time_get_distinct_numbers(self, store: Store) -> None:
        keys = [(version, incumbent) for version in (1, 2) for incumbent in (0, 1)] * 2
        evaluations = await asyncio.gather(
            *(store.begin_evaluation(POLICY_ID, *key, "rewards", lambda number: 0.1 / number) for key in keys)
        )
        assert {(e.version, e.incumbent) for e in evaluations} == set(keys)
        stored = await store.evaluations(POLICY_ID)
        assert [(e.number, e.alpha) for e in stored] == [(n, 0.1 / n) for n in (1, 2, 3, 4)]
        assert sorted(e.number for e in evaluations) == [1, 1, 2, 2, 3, 3, 4, 4]

    async def test_item_that_is_recorded_again_does_not_change(self, store: Store) -> None:
        item = EvaluationItem(POLICY_ID, 1, 0, "held_out", "sess-1", 1.0, 0.0, created_at=5.0)
        unscored = replace(item, item_key="sess-2", candidate_score=None)
        other = replace(item, incumbent=1, incumbent_score=0.5)
        for row in (item, unscored, replace(item, candidate_score=0.25), other):
            await store.add_evaluation_item(row)
        assert await store.evaluation_items(POLICY_ID, 1, 0) == [item, unscored]
        assert await store.evaluation_items(POLICY_ID, 1, 1) == [other]

    async def test_decision_and_stage_change_together(self, store: Store) -> None:
        await add_candidates(store, 1, 2)
        evaluation = await store.begin_evaluation(POLICY_ID, 1, 0, "rewards", lambda number: 0.1)
        passed = replace(
            evaluation, decision="promote", reason="better", results={"held_out": {"lower": 0.1}}
        )
        assert await store.record_evaluation(passed, PolicyStage.SHADOW)
        assert await list_stages(store) == {1: PolicyStage.SHADOW, 2: PolicyStage.CANDIDATE}
        (stored,) = await store.evaluations(POLICY_ID)
        assert replace(stored, updated_at=0.0) == replace(passed, updated_at=0.0)
        assert not await store.record_evaluation(replace(passed, decision="reject"), PolicyStage.REJECTED)
        (stored,) = await store.evaluations(POLICY_ID)
        assert stored.decision == "promote", "the version is no longer a candidate"

    async def test_decision_against_a_version_that_is_no_longer_served_changes_nothing(
        self, store: Store
    ) -> None:
        await add_candidates(store, 1, 2)
        evaluation = await store.begin_evaluation(POLICY_ID, 2, 0, "rewards", lambda number: 0.1)
        await store.promote_version(POLICY_ID, 1)
        decided = replace(evaluation, decision="promote")
        assert not await store.record_evaluation(decided, PolicyStage.SHADOW)
        assert (await list_stages(store))[2] is PolicyStage.CANDIDATE
        (stored,) = await store.evaluations(POLICY_ID)
        assert stored.decision == "more data"

    async def test_version_moves_only_from_the_expected_stage(self, store: Store) -> None:
        await add_candidates(store, 1, 2)
        assert await store.promotable_versions(POLICY_ID) == [1, 2]
        candidate, shadow, canary = PolicyStage.CANDIDATE, PolicyStage.SHADOW, PolicyStage.CANARY
        assert not await store.move_version(POLICY_ID, 1, shadow, canary, "")
        assert await store.move_version(POLICY_ID, 1, candidate, shadow, "")
        assert await store.move_version(POLICY_ID, 1, shadow, canary, "")
        assert await store.move_version(POLICY_ID, 1, canary, PolicyStage.SERVING, "")
        assert await store.move_version(POLICY_ID, 2, candidate, PolicyStage.REJECTED, "worse")
        assert await list_stages(store) == {1: PolicyStage.SERVING, 2: PolicyStage.REJECTED}
        assert await store.promotable_versions(POLICY_ID) == []
        assert await store.rejected_versions(POLICY_ID) == {2: 2}
