"""Conformance tests for policies, groups, steps, claims and progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from instar.errors import ConflictError, StoreError
from instar.store.base import Run, Store
from instar.types import (
    Artifact,
    Channel,
    GroupStatus,
    Policy,
    PolicyStage,
    SessionStatus,
    StepState,
    Task,
)

from .factories import (
    POLICY_ID,
    RUN_ID,
    make_claim,
    make_dropped_claim,
    make_group,
    make_session,
)


class PolicyTests:
    async def test_latest_policy_without_versions_is_the_base_model(self, store: Store) -> None:
        assert await store.latest_policy(POLICY_ID) == Policy(POLICY_ID, 0, Artifact("base"))
        assert await store.published_policies(POLICY_ID) == []

    async def test_initial_policy_is_version_0_and_can_be_replaced(self, store: Store) -> None:
        adapter = Policy(POLICY_ID, 0, Artifact("adapter", "/initial/adapter"))
        sampler = Policy(POLICY_ID, 0, Artifact("remote", "sampler", expires_at=9.5))
        for policy in (adapter, sampler):
            await store.put_initial_policy(policy, RUN_ID)
            assert await store.latest_policy(POLICY_ID) == policy
            assert await store.published_policies(POLICY_ID) == [(policy, 0)]
        assert await store.reserve_version(POLICY_ID, RUN_ID, 1) == 1
        renewed = Policy(POLICY_ID, 0, Artifact("remote", "renewed-sampler", expires_at=99.0))
        await store.publish(renewed)
        assert await store.latest_policy(POLICY_ID) == renewed

    async def test_latest_policy_ignores_candidates_until_one_is_promoted(self, store: Store) -> None:
        for step in (1, 2, 3):
            await store.reserve_version(POLICY_ID, RUN_ID, step, parent=step - 1, is_candidate=True)
            await store.claim_step(POLICY_ID, step, [], run_id=RUN_ID)
            await store.publish(Policy(POLICY_ID, step, Artifact("adapter", f"/policies/{step}")))
        assert (await store.latest_policy(POLICY_ID)).version == 0
        with pytest.raises(StoreError, match="before step 2 is committed"):
            await store.promote_version(POLICY_ID, 2)
        await store.advance_step(POLICY_ID, 2, StepState.COMMITTED, version=2)
        await store.promote_version(POLICY_ID, 2)
        assert (await store.latest_policy(POLICY_ID)).artifact.path == "/policies/2"
        with pytest.raises(StoreError, match=r"version 2 is serving, but must be a candidate. Candidates: 3"):
            await store.promote_version(POLICY_ID, 2)
        rows = await store.policy_versions(POLICY_ID)
        assert [(row.stage, row.parent) for row in rows] == [("retired", 0), ("serving", 1), ("candidate", 2)]
        assert [row.promoted_at is None for row in rows] == [True, False, True]

    async def test_advance_version_moves_a_committed_candidate_only_forward(self, store: Store) -> None:
        await store.reserve_version(POLICY_ID, RUN_ID, 1, parent=0, is_candidate=True)
        await store.claim_step(POLICY_ID, 1, [], run_id=RUN_ID)
        await store.publish(Policy(POLICY_ID, 1, Artifact("adapter", "/policies/1")))
        with pytest.raises(StoreError, match="before step 1 is committed"):
            await store.advance_version(POLICY_ID, 1, PolicyStage.SHADOW, "better")
        await store.advance_step(POLICY_ID, 1, StepState.COMMITTED, version=1)
        await store.advance_version(POLICY_ID, 1, PolicyStage.CANARY, "better")
        with pytest.raises(StoreError, match="cannot move from the stage canary to shadow"):
            await store.advance_version(POLICY_ID, 1, PolicyStage.SHADOW, "better")
        assert (await store.latest_policy(POLICY_ID)).version == 0
        await store.promote_version(POLICY_ID, 1)
        assert [row.stage for row in await store.policy_versions(POLICY_ID)] == ["serving"]

    async def test_reject_version_rejects_its_descendants_and_later_children(self, store: Store) -> None:
        for step, parent in ((1, 0), (2, 1), (3, 2)):
            await store.reserve_version(POLICY_ID, RUN_ID, step, parent=parent, is_candidate=True)
        assert await store.reject_version(POLICY_ID, 2, "worse") == [2, 3]
        await store.reserve_version(POLICY_ID, RUN_ID, 4, parent=3, is_candidate=True)
        await store.reserve_version(POLICY_ID, RUN_ID, 5, parent=1, is_candidate=True)
        stages = [row.stage for row in await store.policy_versions(POLICY_ID)]
        assert stages == ["candidate", "rejected", "rejected", "rejected", "candidate"]

    async def test_roll_back_to_the_base_model_gets_a_new_number(self, store: Store) -> None:
        await store.reserve_version(POLICY_ID, RUN_ID, 1)
        await store.publish(Policy(POLICY_ID, 1, Artifact("adapter", "/policies/1")))
        assert await store.roll_back(POLICY_ID, RUN_ID, 0) == 2
        assert await store.latest_policy(POLICY_ID) == Policy(POLICY_ID, 2, Artifact("base"))
        with pytest.raises(StoreError, match="version 2 is served now"):
            await store.roll_back(POLICY_ID, RUN_ID, 2)
        await store.reserve_version(POLICY_ID, RUN_ID, 3)
        assert await store.reserved_versions(POLICY_ID) == [(3, 3)]

    async def test_reserve_version_after_a_tombstone_returns_a_new_one(self, store: Store) -> None:
        versions = await asyncio.gather(
            *(store.reserve_version(POLICY_ID, RUN_ID, step) for step in range(10))
        )
        assert sorted(versions) == list(range(1, 11))
        assert await store.reserve_version("other", RUN_ID, 0) == 1
        await store.tombstone(POLICY_ID, 10, "crashed")
        assert await store.reserve_version(POLICY_ID, RUN_ID, 11) == 11

    async def test_latest_policy_is_the_newest_published(self, store: Store) -> None:
        for step in (5, 6, 7):
            await store.reserve_version(POLICY_ID, RUN_ID, step)
        first = Policy(POLICY_ID, 1, Artifact("adapter", "/policies/1"))
        second = Policy(POLICY_ID, 2, Artifact("remote", "sampler", expires_at=9.5))
        await store.publish(second)
        await store.publish(first)
        assert await store.latest_policy(POLICY_ID) == second
        assert await store.published_policies(POLICY_ID) == [(first, 5), (second, 6)]
        assert await store.reserved_versions(POLICY_ID) == [(3, 7)]
        renewed = Policy(POLICY_ID, 2, Artifact("remote", "renewed-sampler", expires_at=99.0))
        await store.publish(renewed)
        assert await store.latest_policy(POLICY_ID) == renewed
        await store.tombstone(POLICY_ID, 2, "bad")
        await store.tombstone(POLICY_ID, 2, "bad")
        assert await store.latest_policy(POLICY_ID) == first
        await store.tombstone(POLICY_ID, 3, "abandoned")
        assert await store.reserved_versions(POLICY_ID) == []
        assert await store.steps_by_version(POLICY_ID) == {1: 5, 2: 6, 3: 7}
        assert await store.steps_by_version("other") == {}

    async def test_publish_of_an_unreserved_or_tombstoned_version_raises(self, store: Store) -> None:
        with pytest.raises(StoreError, match="never reserved"):
            await store.publish(Policy(POLICY_ID, 1, Artifact("adapter", "x")))
        await store.reserve_version(POLICY_ID, RUN_ID, 1)
        await store.tombstone(POLICY_ID, 1, "crashed")
        with pytest.raises(StoreError, match="tombstoned"):
            await store.publish(Policy(POLICY_ID, 1, Artifact("adapter", "x")))
        with pytest.raises(StoreError, match="never reserved"):
            await store.tombstone(POLICY_ID, 2, "x")


class GroupAndStepTests:
    async def test_groups_are_ordered_by_index_and_filtered_by_status(self, store: Store) -> None:
        groups = [make_group(f"g{i}", i, task=Task(f"t{i}", {"x": [i]}), created_at=1.0) for i in range(3)]
        for group in reversed(groups):
            await store.open_group(group)
        await store.open_group(make_group("v", 0, channel=Channel.VAL))
        assert await store.groups(RUN_ID, Channel.TRAIN) == groups
        await store.close_group("g1", GroupStatus.READY)
        await store.close_group("g2", GroupStatus.DROPPED, "no sessions")
        ready = await store.groups(RUN_ID, Channel.TRAIN, GroupStatus.READY)
        assert ready == [replace(groups[1], status=GroupStatus.READY)]
        (dropped,) = await store.groups(RUN_ID, Channel.TRAIN, GroupStatus.DROPPED)
        assert dropped.reason == "no sessions"
        with pytest.raises(ConflictError):
            await store.open_group(groups[0])
        with pytest.raises(StoreError):
            await store.close_group("missing", GroupStatus.READY)

    async def test_added_groups_follow_each_other_and_include_their_sessions(self, store: Store) -> None:
        await store.open_group(make_group("v", 7, channel=Channel.VAL))
        for number in range(2):
            group = make_group(f"g{number}", created_at=1.0, deadline_seconds=2.5)
            session = make_session(f"s{number}", group_id=f"g{number}", slot=1)
            added = await store.add_group(group, [(session, f"hash-{number}")])
            assert added == replace(group, index=number)
            assert await store.group(f"g{number}") == added
            stored = await store.session_by_key(f"hash-{number}")
            assert stored is not None
            assert (stored.session_id, stored.slot) == (f"s{number}", 1)

    async def test_group_with_a_taken_session_id_is_not_added(self, store: Store) -> None:
        await store.open_session(make_session("s"))
        with pytest.raises(ConflictError):
            await store.add_group(make_group("g"), [(make_session("s", group_id="g"), "hash")])
        assert await store.group("g") is None

    async def test_closing_a_group_abandons_its_open_sessions_and_rejects_new_ones(
        self, store: Store
    ) -> None:
        await store.open_group(make_group("g"))
        for session_id, group_id in (("completed", "g"), ("open", "g"), ("other", None)):
            await store.open_session(make_session(session_id, group_id=group_id))
        await store.end_session("completed", SessionStatus.COMPLETED)
        await store.close_group("g", GroupStatus.SCORING)
        statuses = {row.session.session_id: row.session.status for row in await store.sessions(RUN_ID)}
        assert statuses == {
            "completed": SessionStatus.COMPLETED,
            "open": SessionStatus.ABANDONED,
            "other": SessionStatus.OPEN,
        }
        session = await store.session("open")
        assert session is not None
        assert session.reason == "superseded"
        assert session.ended_at is not None
        assert not await store.end_session("open", SessionStatus.COMPLETED)
        with pytest.raises(ConflictError, match="group g is already closed"):
            await store.open_session(make_session("late", group_id="g"))
        assert await store.session("late") is None

    async def test_groups_unclaimed_in_epoch_excludes_claimed_ones(self, store: Store) -> None:
        for index in range(3):
            await store.open_group(make_group(f"g{index}", index, status=GroupStatus.READY))
        await store.claim_step(RUN_ID, 0, [make_claim("a", group_id="g0"), make_claim("b", group_id="g0")])
        await store.drop_samples(
            [make_dropped_claim("c", group_id="g1"), make_dropped_claim("d", group_id="g2", run_id="other")]
        )

        async def list_unclaimed(epoch: int) -> list[str]:
            groups = await store.groups(RUN_ID, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=epoch)
            return [group.group_id for group in groups]

        assert await list_unclaimed(0) == ["g2"]
        assert await list_unclaimed(1) == ["g0", "g1", "g2"]
        await store.claim_step(RUN_ID, 1, [make_claim("e", group_id="g1", epoch=2)])
        await store.claim_step(RUN_ID, 2, [make_claim("f", group_id="g2", epoch=2)])
        assert await list_unclaimed(0) == ["g2"]
        assert await list_unclaimed(1) == ["g0", "g1", "g2"]
        assert await list_unclaimed(2) == ["g0"]
        await store.release_steps(RUN_ID, after=1)
        assert await list_unclaimed(2) == ["g0", "g2"]

    async def test_claim_step_of_a_claimed_sample_raises_conflict(self, store: Store) -> None:
        claim = make_claim("a", step=1, reward=1.0, advantage=0.5, staleness=2)
        await store.claim_step(RUN_ID, 1, [claim])
        with pytest.raises(ConflictError, match="a is already claimed by step 1"):
            await store.claim_step(RUN_ID, 2, [make_claim("b"), make_claim("a")])
        with pytest.raises(ConflictError):
            await store.drop_samples([make_dropped_claim("a")])
        assert [step.step for step in await store.steps(RUN_ID)] == [1]
        await store.claim_step(RUN_ID, 2, [make_claim("a", epoch=1)])
        await store.claim_step("other", 1, [make_claim("a", run_id="other")])
        assert await store.claims(RUN_ID, step=1) == [claim]
        assert await store.claims(RUN_ID) == [claim, make_claim("a", epoch=1, step=2)]
        assert await store.claims(RUN_ID, session_id="missing") == []
        with pytest.raises(ConflictError, match="step 2"):
            await store.claim_step(RUN_ID, 2, [make_claim("z")])

    async def test_steps_and_claims_of_the_policies_of_a_run_are_independent(self, store: Store) -> None:
        policies = [f"{RUN_ID}/a", f"{RUN_ID}/b"]
        for policy_id in policies:
            await store.claim_step(policy_id, 1, [make_claim("x", policy_id="")], run_id=RUN_ID)
        with pytest.raises(StoreError, match=f"must be for step 2 of {RUN_ID}/a"):
            await store.claim_step(policies[0], 2, [make_claim("y", policy_id=policies[1])], run_id=RUN_ID)
        with pytest.raises(ConflictError, match=f"in epoch 0 of {RUN_ID}/b"):
            await store.claim_step(policies[1], 2, [make_claim("x", policy_id="")], run_id=RUN_ID)
        assert [claim.policy_id for claim in await store.claims(RUN_ID, step=1)] == policies
        await store.advance_step(policies[0], 1, StepState.COMMITTED, version=1)
        assert await store.release_steps(policies[1], after=0) == [1]
        assert [claim.policy_id for claim in await store.claims(RUN_ID)] == policies[:1]
        assert [step.state for step in await store.steps(policies[0])] == [StepState.COMMITTED]
        assert await store.steps(policies[1]) == await store.steps(RUN_ID) == []
        assert (await store.progress(RUN_ID)).committed_steps == 1

    async def test_groups_unclaimed_by_a_policy_include_those_that_another_one_claimed(
        self, store: Store
    ) -> None:
        await store.open_group(make_group("g0", 0, status=GroupStatus.READY))
        claim = make_claim("x", group_id="g0", policy_id="")
        await store.claim_step(f"{RUN_ID}/a", 1, [claim], run_id=RUN_ID)
        for policy_id, expected in ((f"{RUN_ID}/a", []), (f"{RUN_ID}/b", ["g0"])):
            groups = await store.groups(RUN_ID, Channel.TRAIN, unclaimed_in_epoch=0, unclaimed_by=policy_id)
            assert [group.group_id for group in groups] == expected

    async def test_claim_step_called_concurrently_succeeds_once(self, store: Store) -> None:
        attempts = (
            store.claim_step(RUN_ID, step, [make_claim("a"), make_claim(f"x{step}")]) for step in range(8)
        )
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert sum(isinstance(result, ConflictError) for result in results) == 7
        assert len(await store.claims(RUN_ID)) == 2

    async def test_invalid_claims_and_drops_raise(self, store: Store) -> None:
        with pytest.raises(StoreError, match="must be a drop with a reason"):
            await store.drop_samples([make_dropped_claim("a", reason="")])
        with pytest.raises(StoreError, match="must be a drop with a reason"):
            await store.drop_samples([make_claim("a", reason="x")])
        with pytest.raises(StoreError, match="advantage must be finite, got nan"):
            await store.claim_step(RUN_ID, 1, [make_claim("a", advantage=float("nan"))])
        assert await store.claims(RUN_ID) == []

    async def test_advance_step_only_moves_forward(self, store: Store) -> None:
        await store.claim_step(RUN_ID, 1, [make_claim("a")])
        await store.advance_step(RUN_ID, 1, StepState.SUBMITTED)
        await store.advance_step(RUN_ID, 1, StepState.SAVED, state_path="/state/1", metrics={"loss": 0.5})
        await store.advance_step(RUN_ID, 1, StepState.COMMITTED, version=3)
        await store.advance_step(RUN_ID, 1, StepState.COMMITTED)
        (step,) = await store.steps(RUN_ID)
        assert (step.state, step.state_path, step.version) == (StepState.COMMITTED, "/state/1", 3)
        assert step.metrics == {"loss": 0.5}
        assert step.updated_at == pytest.approx(time.time(), abs=30)
        for state in (StepState.SAVED, StepState.RELEASED):
            with pytest.raises(StoreError, match="cannot become"):
                await store.advance_step(RUN_ID, 1, state)
        with pytest.raises(StoreError, match="not claimed"):
            await store.advance_step(RUN_ID, 9, StepState.SAVED)

    async def test_steps_to_commit_include_uncommitted_earlier_steps(self, store: Store) -> None:
        states = [StepState.COMMITTED, StepState.SUBMITTED, StepState.SAVED, StepState.CLAIMED]
        for number, state in enumerate(states, start=1):
            await store.claim_step(RUN_ID, number, [make_claim(f"k{number}")])
            await store.advance_step(RUN_ID, number, state)
        assert [step.step for step in await store.steps_to_commit(RUN_ID, 3)] == [2, 3]
        assert [step.step for step in await store.steps_to_commit(RUN_ID, 1)] == [1]

    async def test_progress_details_count_waiting_groups_and_trained_steps(self, store: Store) -> None:
        for index in range(3):
            await store.open_group(make_group(f"g{index}", index, status=GroupStatus.READY))
        await store.claim_step(RUN_ID, 1, [make_claim("a", group_id="g0")])
        await store.advance_step(RUN_ID, 1, StepState.SUBMITTED, version=1)
        await store.claim_step(RUN_ID, 2, [make_claim("b", group_id="g1")])
        details = await store.progress_details(RUN_ID, 0)
        assert (details.waiting_groups, details.steps, details.trained_steps) == (1, 2, 1)
        await store.release_steps(RUN_ID, after=1)
        details = await store.progress_details(RUN_ID, 0)
        assert (details.waiting_groups, details.steps, details.trained_steps) == (2, 1, 1)

    async def test_release_steps_with_include_saved_removes_all_later_steps(self, store: Store) -> None:
        for number, state in enumerate([StepState.COMMITTED, StepState.SAVED, StepState.COMMITTED]):
            await store.claim_step(RUN_ID, number, [make_claim(f"k{number}")])
            await store.advance_step(RUN_ID, number, state)
        assert await store.release_steps(RUN_ID, after=0, include_saved=True) == [1, 2]
        assert [step.step for step in await store.steps(RUN_ID)] == [0]
        assert [claim.sample_key for claim in await store.claims(RUN_ID)] == ["k0"]

    async def test_release_steps_removes_only_unsaved_steps(self, store: Store) -> None:
        states = [StepState.COMMITTED, StepState.SAVED, StepState.SUBMITTED, StepState.CLAIMED]
        for number, state in enumerate(states):
            await store.claim_step(RUN_ID, number, [make_claim(f"k{number}")])
            await store.advance_step(RUN_ID, number, state)
        await store.claim_step("other", 9, [make_claim("x", run_id="other")])
        await store.drop_samples([make_dropped_claim("d")])
        assert await store.release_steps(RUN_ID, after=2) == [3]
        assert await store.release_steps(RUN_ID, after=-1) == [2]
        assert await store.release_steps(RUN_ID, after=-1) == []
        assert [step.step for step in await store.steps(RUN_ID)] == [0, 1]
        assert [claim.sample_key for claim in await store.claims(RUN_ID)] == ["k0", "k1", "d"]
        assert len(await store.claims("other")) == 1
        with pytest.raises(StoreError, match="not claimed"):
            await store.advance_step(RUN_ID, 2, StepState.SUBMITTED)
        await store.claim_step(RUN_ID, 2, [make_claim("k3"), make_claim("k2")])
        last_step = (await store.steps(RUN_ID))[-1]
        assert (last_step.step, last_step.state) == (2, StepState.CLAIMED)


class ProgressTests:
    async def test_progress_counts_groups_after_every_change(self, store: Store) -> None:
        async def get_counts() -> tuple[int, int, int]:
            progress = await store.progress(RUN_ID)
            return progress.groups_open, progress.groups_ready, progress.groups_consumed

        empty = await store.progress(RUN_ID)
        assert (empty.next_group_index, empty.committed_steps, empty.head_version) == (0, 0, 0)
        await store.put_run(Run(RUN_ID, POLICY_ID, {}))
        for index in range(4):
            await store.open_group(make_group(f"g{index}", index))
        await store.open_group(make_group("v", 40, channel=Channel.VAL))
        assert await get_counts() == (4, 0, 0)
        for index in range(3):
            await store.close_group(f"g{index}", GroupStatus.READY)
        await store.close_group("g3", GroupStatus.DROPPED, "x")
        assert await get_counts() == (0, 3, 1)
        await store.claim_step(RUN_ID, 1, [make_claim("a", group_id="g0"), make_claim("b", group_id="g0")])
        await store.drop_samples(
            [make_dropped_claim("c", group_id="g0"), make_dropped_claim("d", group_id="g1")]
        )
        assert await get_counts() == (0, 2, 2)
        await store.advance_step(RUN_ID, 1, StepState.SAVED)
        assert await get_counts() == (0, 2, 2)
        await store.advance_step(RUN_ID, 1, StepState.COMMITTED)
        assert await get_counts() == (0, 1, 3)
        await store.claim_step(
            RUN_ID, 2, [make_claim("a", group_id="g0", epoch=1), make_claim("e", group_id=None)]
        )
        assert await get_counts() == (0, 2, 2)
        await store.release_steps(RUN_ID, after=1)
        assert await get_counts() == (0, 1, 3)
        await store.claim_step("other", 1, [make_claim("a", run_id="other", group_id="g0")])
        assert await get_counts() == (0, 1, 3)
        progress = await store.progress(RUN_ID)
        assert (progress.next_group_index, progress.committed_steps) == (4, 1)
        assert (await store.progress(RUN_ID, Channel.VAL)).next_group_index == 41

    async def test_group_is_consumed_when_its_step_is_committed_or_published(self, store: Store) -> None:
        await store.put_run(Run(RUN_ID, POLICY_ID, {}))
        for index in range(2):
            await store.open_group(make_group(f"g{index}", index))
            await store.close_group(f"g{index}", GroupStatus.READY)
        await store.claim_step(RUN_ID, 1, [make_dropped_claim("a", group_id="g0", step=1)])
        assert (await store.progress(RUN_ID)).groups_consumed == 0
        await store.advance_step(RUN_ID, 1, StepState.COMMITTED)
        assert (await store.progress(RUN_ID)).groups_consumed == 1
        await store.claim_step(RUN_ID, 2, [make_claim("b", group_id="g1", step=2)])
        await store.advance_step(RUN_ID, 2, StepState.SUBMITTED, version=1)
        assert (await store.progress(RUN_ID)).groups_consumed == 2

    async def test_progress_counts_sessions_and_reports_the_head_version(self, store: Store) -> None:
        await store.put_run(Run(RUN_ID, POLICY_ID, {}))
        for name in "abc":
            await store.open_session(make_session(name))
        await store.open_session(make_session("v", channel=Channel.VAL))
        await store.end_session("a", SessionStatus.COMPLETED)
        await store.end_session("b", SessionStatus.COMPLETED)
        assert (await store.progress(RUN_ID)).sessions == {"open": 1, "completed": 2}
        assert (await store.progress(RUN_ID, Channel.VAL)).sessions == {"open": 1}
        await store.reserve_version(POLICY_ID, RUN_ID, 1)
        assert (await store.progress(RUN_ID)).head_version == 0
        await store.publish(Policy(POLICY_ID, 1, Artifact("adapter", "x")))
        assert (await store.progress(RUN_ID)).head_version == 1
