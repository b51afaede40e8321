from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from instar.config import RuleRewardConfig
from instar.data.batcher import Batcher, StepBatch
from instar.store.base import Store
from instar.store.sqlite import SqliteStore
from instar.types import (
    UNTRAINABLE,
    Channel,
    ClaimOutcome,
    Group,
    GroupStatus,
    Reward,
    RewardSource,
    SessionStatus,
    StepState,
    Tag,
    Task,
)
from tests.unit.data.builders import (
    RUN,
    add_group,
    add_session,
    make_call,
    make_config,
    make_session,
    put_test_run,
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = SqliteStore(tmp_path / "store.db")
    await put_test_run(store)
    yield store
    await store.close()


async def take_batch(
    store: Store, batcher: Batcher, step: int = 1, version: int = 0, timeout: float = 0.0
) -> StepBatch:
    """Return the next batch and record its claims, as the trainer does."""
    batch = await batcher.next_batch(step, 0, version, timeout=timeout)
    assert batch is not None
    await store.drop_samples(batch.drops)
    await store.claim_step(RUN, step, batch.claims)
    return batch


async def load_outcomes(store: Store) -> dict[str, str]:
    return {claim.sample_key: claim.reason or claim.outcome for claim in await store.claims(RUN)}


async def test_batcher_consumes_groups_in_index_order(store: Store) -> None:
    for index in (2, 0, 1):
        await add_group(store, index, [1.0, 0.0])
    batcher = Batcher(store, RUN, make_config(groups_per_step=2))
    batch = await take_batch(store, batcher)
    keys = [sample.sample_key for sample in batch.samples]
    assert keys == [f"{RUN}/train/00000{group}/{slot}/0" for group in (0, 1) for slot in (0, 1)]
    first = batch.samples[0]
    np.testing.assert_allclose(first.advantages, first.mask / 4, atol=1e-4)
    assert {claim.step for claim in batch.claims} == {1}
    claim = batch.claims[1]
    assert (claim.reward, round(claim.advantage or 0, 3), claim.staleness) == (0.0, -1.0, 0)
    report = batch.report
    assert (report["reward_mean"], report["groups"], report["sessions"]) == (0.5, 2, 4)
    assert (report["tokens"], report["zero_signal"], report["staleness_max"]) == (8, 0, 0)
    assert await batcher.next_batch(2, 0, 0, timeout=0.0) is None, "one group is not enough"


async def test_batcher_is_deterministic_for_the_same_rows(store: Store) -> None:
    for index in range(3):
        await add_group(store, index, [1.0, 0.0, 0.5], version=index)
    config = make_config(groups_per_step=3, max_staleness=2)
    first, second = [await Batcher(store, RUN, config).next_batch(1, 0, 2) for _ in range(2)]
    assert first is not None
    assert second is not None
    assert first.claims == second.claims
    assert first.report == second.report
    for a, b in zip(first.samples, second.samples, strict=True):
        assert a.sample_key == b.sample_key
        assert a.advantages.tobytes() == b.advantages.tobytes()


async def test_batcher_waits_for_groups_until_stopped(store: Store) -> None:
    batcher = Batcher(store, RUN, make_config(groups_per_step=1))
    stop = asyncio.Event()
    task = asyncio.create_task(batcher.next_batch(1, 0, 0, stop=stop))
    await asyncio.sleep(0.12)
    assert not task.done()
    await add_group(store, 0, [1.0, 0.0])
    assert await asyncio.wait_for(task, 5) is not None
    stop.set()
    started_at = time.monotonic()
    await store.close_group(f"{RUN}/train/000000", GroupStatus.DROPPED, "test")
    assert await batcher.next_batch(2, 0, 0, stop=stop) is None
    assert time.monotonic() - started_at < 2


async def test_batcher_takes_remaining_groups_after_rollout_has_finished(store: Store) -> None:
    await add_group(store, 0, [1.0, 0.0])
    batcher = Batcher(store, RUN, make_config(groups_per_step=4))
    batch = await batcher.next_batch(1, 0, 0, is_finished=lambda: True)
    assert batch is not None
    await store.claim_step(RUN, 1, batch.claims)
    assert batch.report["groups"] == 1
    assert await batcher.next_batch(2, 0, 0, is_finished=lambda: True) is None


async def test_batcher_drops_groups_older_than_max_staleness(store: Store) -> None:
    old_group = await add_group(store, 0, [1.0, 0.0], version=1)
    await add_group(store, 1, [1.0, 0.0], version=2)
    batcher = Batcher(store, RUN, make_config(groups_per_step=1, max_staleness=1))
    batch = await take_batch(store, batcher, version=3)
    assert {sample.group_id for sample in batch.samples} == {f"{RUN}/train/000001"}
    assert [(c.group_id, c.reason, c.step, c.staleness) for c in batch.drops] == [
        (old_group, "stale", None, 2)
    ] * 2
    assert batch.report["stale_dropped"] == 2
    assert batch.report["staleness_mean"] == 1.0


async def test_batcher_drops_stale_groups_while_waiting(store: Store) -> None:
    """Otherwise, the rollout and the trainer would wait for each other."""
    await add_group(store, 0, [1.0, 0.0], version=0)
    batcher = Batcher(store, RUN, make_config(groups_per_step=1, max_staleness=0))
    assert await batcher.next_batch(1, 0, 5, timeout=0.0) is None
    assert set((await load_outcomes(store)).values()) == {"stale"}
    assert (await store.progress(RUN)).groups_consumed == 1


async def test_batcher_drops_only_the_stale_samples_of_a_group(store: Store) -> None:
    group = await add_group(store, 0, [1.0], version=0, status=GroupStatus.OPEN)
    await add_session(store, group, 1, 0.0, version=3)
    await store.close_group(group, GroupStatus.READY)
    batch = await take_batch(store, Batcher(store, RUN, make_config(groups_per_step=1)), version=3)
    assert [sample.sample_key for sample in batch.samples] == [f"{group}/1/0"]
    assert batch.samples[0].advantages.min() < -0.9, "the mean still includes the old session"
    assert await load_outcomes(store) == {f"{group}/0/0": "stale", f"{group}/1/0": "trained"}


async def test_batcher_claims_groups_without_signal_in_the_step(store: Store) -> None:
    await add_group(store, 0, [1.0, 1.0])
    await add_group(store, 1, [1.0, 0.0])
    batcher = Batcher(store, RUN, make_config(groups_per_step=2))
    batch = await take_batch(store, batcher)
    assert batch.report["zero_signal"] == 1
    assert batch.report["reward_mean"] == 0.75
    assert len(batch.samples) == 2
    dropped = [c for c in batch.claims if c.outcome is ClaimOutcome.DROPPED]
    assert [(c.reason, c.step, c.reward) for c in dropped] == [("zero_signal", 1, 1.0)] * 2
    assert await store.release_steps(RUN, after=0) == [1]
    retried = await Batcher(store, RUN, batcher.config).next_batch(1, 0, 0)
    assert retried is not None
    assert retried.claims == batch.claims, "a step that was released after a crash gets the same batch"


async def test_batcher_returns_an_empty_batch_without_any_signal(store: Store) -> None:
    await add_group(store, 0, [0.0, 0.0])
    batch = await take_batch(store, Batcher(store, RUN, make_config(groups_per_step=1)))
    assert batch.samples == []
    assert batch.report["tokens"] == 0


@pytest.mark.parametrize(("failed_reward", "trained_count"), [(None, 2), (-1.0, 3)])
async def test_batcher_uses_failed_reward_for_failed_sessions(
    store: Store, failed_reward: float | None, trained_count: int
) -> None:
    group = await add_group(store, 0, [1.0, 0.0], status=GroupStatus.OPEN)
    await add_session(store, group, 2, None, status=SessionStatus.FAILED)
    await add_session(store, group, 3, None, status=SessionStatus.FAILED, call_count=0)
    await store.close_group(group, GroupStatus.READY)
    config = make_config(groups_per_step=1, failed_reward=failed_reward)
    batch = await take_batch(store, Batcher(store, RUN, config))
    assert len(batch.samples) == trained_count
    assert batch.report["failed"] == 2
    outcomes = await load_outcomes(store)
    assert outcomes[f"{group}/2/0"] == ("failed" if failed_reward is None else "trained")
    assert outcomes[f"{group}/3/0"] == ("failed" if failed_reward is None else "no_tokens")
    if failed_reward is None:
        assert batch.report["reward_mean"] == 0.5, "failed sessions are excluded from the mean"


async def test_batcher_ignores_agent_rewards_if_a_rule_scores(store: Store) -> None:
    group = await add_group(store, 0, [1.0, 0.0], status=GroupStatus.OPEN)
    await add_session(store, group, 2, None)
    await store.add_rewards([Reward(f"{group}:2.0", 1.0, RewardSource.AGENT)])
    await store.close_group(group, GroupStatus.READY)
    rule = RuleRewardConfig(type="rule", function="instar.demo.tasks:score")
    config = make_config(groups_per_step=1).model_copy(update={"reward": [rule]})
    batch = await take_batch(store, Batcher(store, RUN, config))
    assert (await load_outcomes(store))[f"{group}/2/0"] == "no_reward"
    assert batch.report["reward_mean"] == 0.5


async def test_batcher_uses_only_the_final_session_of_a_slot(store: Store) -> None:
    group = await add_group(store, 0, [0.0], status=GroupStatus.OPEN)
    await add_session(store, group, 1, None, status=SessionStatus.FAILED)
    await add_session(store, group, 1, 1.0, attempt=1)
    await add_session(store, group, 1, 1.0, attempt=2, status=SessionStatus.ABANDONED)
    await store.close_group(group, GroupStatus.READY)
    batch = await take_batch(store, Batcher(store, RUN, make_config(groups_per_step=1)))
    assert [sample.session_id for sample in batch.samples] == [f"{group}:0.0", f"{group}:1.1"]
    outcomes = await load_outcomes(store)
    assert outcomes == {f"{group}/0/0": "trained", f"{group}/1/0": "trained", f"{group}:1.0/0": "superseded"}


async def test_batcher_drops_sessions_that_end_after_their_group_was_claimed(store: Store) -> None:
    group = await add_group(store, 0, [1.0, 0.0])
    config = make_config(groups_per_step=1)
    batcher = Batcher(store, RUN, config)
    await take_batch(store, batcher)
    await add_session(store, group, 1, 1.0, attempt=7)
    assert await batcher.next_batch(2, 0, 0, timeout=0.0) is None
    assert (await load_outcomes(store))[f"{group}:1.7/0"] == "late"
    assert await batcher.next_batch(2, 0, 0, timeout=0.0) is None, "the session is dropped only once"
    await add_session(store, group, 0, 1.0, attempt=8)
    restarted = Batcher(store, RUN, config)
    assert await restarted.next_batch(2, 0, 0, timeout=0.0) is None
    assert (await load_outcomes(store))[f"{group}:0.8/0"] == "late", (
        "a restarted trainer also drops the session"
    )


async def test_late_sessions_do_not_block_a_group_whose_step_was_released(store: Store) -> None:
    group = await add_group(store, 0, [1.0, 0.0])
    config = make_config(groups_per_step=1)
    batcher = Batcher(store, RUN, config)
    await take_batch(store, batcher)
    await add_session(store, group, 1, 0.0, attempt=7)
    assert await batcher.next_batch(2, 0, 0, timeout=0.0) is None
    await add_session(store, group, 0, 1.0, attempt=8)
    assert await Batcher(store, RUN, config).next_batch(2, 0, 0, timeout=0.0) is None
    assert await store.release_steps(RUN, after=0) == [1]
    assert len((await take_batch(store, Batcher(store, RUN, config))).samples) == 2


async def test_batcher_drops_groups_that_the_rollout_abandoned(store: Store) -> None:
    group = await add_group(store, 0, [1.0, None], status=GroupStatus.DROPPED, reason="session_failed")
    assert await Batcher(store, RUN, make_config()).next_batch(1, 0, 0, timeout=0.0) is None
    assert await load_outcomes(store) == {f"{group}/0/0": "session_failed", f"{group}/1/0": "session_failed"}


async def test_call_reward_is_added_to_the_tokens_of_the_call(store: Store) -> None:
    group = await add_group(store, 0, [1.0, 1.0], status=GroupStatus.OPEN)
    session = await add_session(store, group, 2, 1.0, call_count=2)
    await store.add_rewards([Reward(session, 0.5, RewardSource.HUMAN, call_id=f"{session}#1")])
    await store.close_group(group, GroupStatus.READY)
    config = make_config(groups_per_step=1, advantage={"normalize": "none"})
    batch = await take_batch(store, Batcher(store, RUN, config))
    assert batch.report["zero_signal"] == 0
    assert batch.samples[2].advantages.tolist() == [0, 0, 0, 0, 0, 0, 0.5, 0.5]


async def test_running_baseline_is_restored_after_a_restart(store: Store) -> None:
    await add_group(store, 0, [1.0])
    await add_group(store, 1, [0.0])
    config = make_config(groups_per_step=1, advantage={"estimator": "running", "normalize": "none"})
    first = Batcher(store, RUN, config)
    assert (await take_batch(store, first)).report["zero_signal"] == 1
    restarted = Batcher(store, RUN, config)
    restarted.estimator.load_json(first.estimator.to_json())
    batch = await take_batch(store, restarted, step=2)
    assert batch.samples[0].advantages.min() == -1.0


async def test_batcher_never_returns_committed_groups_again(store: Store) -> None:
    await add_group(store, 0, [1.0, 0.0])
    config = make_config(groups_per_step=1)
    await take_batch(store, Batcher(store, RUN, config))
    await store.advance_step(RUN, 1, StepState.COMMITTED)
    assert await Batcher(store, RUN, config).next_batch(2, 0, 0, timeout=0.0) is None


@pytest.mark.parametrize("reference_weight", [0.0, 0.1])
async def test_batcher_drops_a_group_without_sessions_once(store: Store, reference_weight: float) -> None:
    await add_group(store, 0, [])
    config = make_config(groups_per_step=1, reference={"type": "base", "weight": reference_weight})
    batcher = Batcher(store, RUN, config)
    batch = await take_batch(store, batcher)
    assert [claim.reason for claim in batch.claims] == ["no_sessions"]
    assert await batcher.next_batch(2, 0, 0, timeout=0.0) is None


@pytest.mark.parametrize("normalize", ["batch_tokens", "batch_sessions", "session_tokens", "none"])
async def test_scales_equal_normalized_unit_advantages(store: Store, normalize: str) -> None:
    """A token has the same weight whether its advantage comes from the reward or is added later."""
    group = await add_group(store, 0, [1.0, -1.0], status=GroupStatus.OPEN)
    await add_session(store, group, 2, 0.0, call_count=3)
    await store.close_group(group, GroupStatus.READY)
    advantage = {"estimator": "grpo_no_std", "normalize": normalize, "weight": 0.5}
    batch = await take_batch(store, Batcher(store, RUN, make_config(groups_per_step=1, advantage=advantage)))
    for sample, scale, value in zip(batch.samples, batch.scales, (0.5, -0.5, 0.0), strict=True):
        np.testing.assert_allclose(sample.advantages, value * scale, rtol=1e-6)
        assert (scale[sample.mask > 0] > 0).all()
        assert (scale[sample.mask == 0] == 0).all()


async def test_batcher_trains_groups_with_equal_rewards_if_a_reference_is_used(store: Store) -> None:
    await add_group(store, 0, [1.0, 1.0])
    await add_group(store, 1, [1.0, None])
    config = make_config(groups_per_step=2, reference={"type": "base", "weight": 0.1})
    batch = await take_batch(store, Batcher(store, RUN, config))
    assert batch.report["zero_signal"] == 0
    assert [sample.advantages.any() for sample in batch.samples] == [False] * 3
    assert [claim.reason for claim in batch.claims] == [None, None, None, "no_reward"]


async def test_batcher_needs_no_rewards_for_pure_distillation(store: Store) -> None:
    """Failed sessions are still excluded."""
    group = await add_group(store, 0, [1.0, None], status=GroupStatus.OPEN)
    await add_session(store, group, 2, None, status=SessionStatus.FAILED)
    await store.close_group(group, GroupStatus.READY)
    config = make_config(
        groups_per_step=1, advantage={"weight": 0}, reference={"type": "base", "weight": 1.0}, group_size=1
    )
    batch = await take_batch(store, Batcher(store, RUN, config))
    assert [sample.advantages.any() for sample in batch.samples] == [False] * 2
    assert [claim.reason for claim in batch.claims] == [None, None, "failed"]


async def test_batcher_drops_sessions_tagged_untrainable(store: Store) -> None:
    first = await add_group(store, 0, [1.0, 0.0, 5.0])
    second = await add_group(store, 1, [1.0, 0.0])
    batcher = Batcher(store, RUN, make_config(groups_per_step=2, group_size=3))
    assert await batcher.next_batch(1, 0, 0, timeout=0.0) is not None, "both groups are loaded"
    batcher.reset()
    tagged = [f"{first}:2.0", f"{second}:0.0", f"{second}:1.0"]
    await store.add_tags([Tag(session_id, UNTRAINABLE) for session_id in tagged])
    batch = await take_batch(store, batcher)
    assert [sample.session_id for sample in batch.samples] == [f"{first}:0.0", f"{first}:1.0"]
    assert [round(claim.advantage or 0, 3) for claim in batch.claims if claim.reason is None] == [1.0, -1.0]
    dropped = [claim for claim in await store.claims(RUN) if claim.reason == UNTRAINABLE]
    assert sorted(claim.session_id for claim in dropped) == sorted(tagged)
    assert await batcher.next_batch(2, 0, 0, is_finished=lambda: True) is None, "both groups are consumed"


async def test_preview_equals_the_next_batch_and_writes_nothing(store: Store) -> None:
    await add_group(store, 0, [1.0, 0.0])
    await add_group(store, 1, [0.5, 0.5], version=0)
    await add_group(store, 2, [], status=GroupStatus.DROPPED, reason="too many failed")
    config = make_config(groups_per_step=2)
    preview = await Batcher(store, RUN, config).preview(1, 0, 0)
    assert await store.claims(RUN) == []
    batch = await take_batch(store, Batcher(store, RUN, config))
    assert (preview.claims, preview.drops, preview.report) == (batch.claims, batch.drops, batch.report)
    await add_group(store, 3, [1.0, 0.0])
    incomplete = await Batcher(store, RUN, config).preview(2, 0, 0)
    assert len(incomplete.samples) == 2, "the preview includes groups even if a step needs more"


async def test_batcher_claims_only_the_groups_of_the_step(store: Store) -> None:
    for index in range(4):
        await add_group(store, index, [1.0, 0.0], version=0 if index == 1 else 3)
    batcher = Batcher(store, RUN, make_config(groups_per_step=2, max_staleness=1))
    batch = await take_batch(store, batcher, version=3)
    assert sorted({claim.group_id for claim in batch.claims}) == [
        f"{RUN}/train/000000",
        f"{RUN}/train/000002",
    ]
    assert {claim.reason for claim in batch.drops} == {"stale"}


async def test_report_contains_output_length_and_repetition(store: Store) -> None:
    group = await add_group(store, 0, [])
    for slot, reward in enumerate((1.0, 0.0)):
        await add_session(store, group, slot, reward, call_count=3)
    session = await add_session(store, group, 2, 0.5, call_count=3)
    other = await add_session(store, await add_group(store, 1, []), 2, 0.5, call_count=3)
    batch = await Batcher(store, RUN, make_config(groups_per_step=2)).preview(1, 0, 0)
    assert batch.report["output_tokens_mean"] == 6.0
    # 7 9 7 9 7 9 repeats one of its three 4-grams, and 9 9 9 9 9 9 repeats two.
    assert batch.report["output_repetition"] == pytest.approx(1 / 2)
    assert batch.report["identical_share"] == 0.0, f"{session} and {other} are in different groups"


async def test_rolled_back_versions_do_not_increase_staleness(store: Store) -> None:
    """The first step published version 1, was rolled back, and was retrained as version 4."""
    await add_group(store, 0, [1.0, 0.0], version=0)
    batcher = Batcher(store, RUN, make_config(groups_per_step=1, max_staleness=1))
    batch = await batcher.next_batch(1, 0, 4, step_by_version={1: 1, 4: 1}, timeout=0.0)
    assert batch is not None
    assert {claim.staleness for claim in batch.claims} == {1}
    assert set(batch.report["staleness_tokens"]) == {"1"}
    assert set(batch.report["version_shares"]) == {"0"}


async def test_tokens_of_a_rolled_back_version_have_staleness_zero(store: Store) -> None:
    await add_group(store, 0, [1.0, 0.0], version=3)
    batcher = Batcher(store, RUN, make_config(groups_per_step=1, max_staleness=1))
    batch = await batcher.next_batch(1, 0, 0, step_by_version={3: 3}, timeout=0.0)
    assert batch is not None
    assert set(batch.report["staleness_tokens"]) == {"0"}


async def test_report_counts_tokens_masked_as_stale(store: Store) -> None:
    versions = np.array([0, 0, 0, 5], np.int32)
    group_id = f"{RUN}/train/000000"
    await store.open_group(Group(group_id, RUN, Channel.TRAIN, 0, 2, Task("t", {})))
    for slot, reward in enumerate([1.0, 0.0]):
        session_id = f"{group_id}:{slot}"
        await store.open_session(make_session(session_id, group_id=group_id, slot=slot))
        call = make_call(f"{session_id}#0", [1, 2], [7, 8, 9, 10], session_id=session_id, versions=versions)
        await store.add_calls([call])
        rewards = [Reward(session_id, reward, RewardSource.RULE, "t")]
        await store.end_session(session_id, SessionStatus.COMPLETED, None, rewards)
    await store.close_group(group_id, GroupStatus.READY)
    batcher = Batcher(store, RUN, make_config(groups_per_step=1, max_staleness=1, stale="mask"))
    batch = await take_batch(store, batcher, version=5)
    assert (batch.report["tokens"], batch.report["stale_masked_tokens"]) == (2, 6)


async def test_unrewarded_or_untrainable_groups_do_not_count_as_zero_signal(store: Store) -> None:
    await add_group(store, 0, [None, None])
    tagged = await add_group(store, 1, [1.0, 0.0])
    await add_group(store, 2, [1.0, 1.0])
    await store.add_tags([Tag(f"{tagged}:{slot}.0", UNTRAINABLE) for slot in (0, 1)])
    batch = await take_batch(store, Batcher(store, RUN, make_config(groups_per_step=3)))
    assert batch.report["zero_signal"] == 1
    assert batch.report["dropped"] == {"no_reward": 2, "untrainable": 2, "zero_signal": 2}
