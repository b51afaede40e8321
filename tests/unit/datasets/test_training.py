"""Tests for training on imported datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.cli.plan import make_plan
from instar.config import RunConfig
from instar.config.data import count_groups
from instar.data.batcher import Batcher, StepBatch
from instar.datasets.importing import import_for_training, import_sessions
from instar.errors import DataError
from instar.store.base import SessionFilter, Store
from instar.store.sqlite import SqliteStore
from instar.types import Channel, Reward, RewardSource, SessionStatus
from tests.unit.data.builders import RUN, add_group, make_call, make_config, make_session, put_test_run
from tests.unit.datasets.harness import add_session, export_all, fill_store


@pytest.fixture
async def store(tmp_path: Path):
    source = SqliteStore(tmp_path / "store.db")
    await fill_store(source, groups=4)
    yield source
    await source.close()


@pytest.fixture
async def target(tmp_path: Path):
    store = SqliteStore(tmp_path / "other.db")
    await put_test_run(store)
    yield store
    await store.close()


def make_data_config(data: Any, **trainer: Any) -> RunConfig:
    config = make_config(**{"groups_per_step": 2, "advantage": {"estimator": "running"}, **trainer})
    return RunConfig.model_validate({**config.model_dump(), "data": data})


async def import_dataset(store: Store, target: Store, tmp_path: Path, label: str = "golden@1") -> None:
    manifest = await export_all(store, tmp_path / label)
    await import_for_training(target, tmp_path / label, RUN, label, manifest)


async def claim_batch(store: Store, batcher: Batcher, step: int) -> StepBatch | None:
    batch = await batcher.next_batch(step, 0, version=step - 1, is_finished=lambda: True)
    if batch is not None:
        await store.drop_samples(batch.drops)
        await store.claim_step(RUN, step, batch.claims)
    return batch


def list_claimed_groups(batch: StepBatch | None) -> list[tuple[str, int]]:
    assert batch is not None
    groups = {(str(claim.group_id).removeprefix(f"{RUN}/"), claim.epoch): None for claim in batch.claims}
    return list(groups)


def assert_same_batch(expected: StepBatch, actual: StepBatch) -> None:
    assert len(expected.samples) == len(actual.samples) > 0
    for left, right in zip(expected.samples, actual.samples, strict=True):
        for name in ("token_ids", "mask", "logprobs", "advantages", "versions"):
            assert getattr(left, name).tobytes() == getattr(right, name).tobytes(), name
        assert left.spans == right.spans
        assert left.sample_key == right.sample_key
    assert expected.claims == actual.claims
    assert expected.report == actual.report


async def test_batcher_on_imported_sessions_makes_the_same_batches(store: Store, tmp_path: Path) -> None:
    manifest = await export_all(store, tmp_path / "out", format="parquet")
    copy = SqliteStore(tmp_path / "copy.db")
    await put_test_run(copy)
    await import_sessions(copy, tmp_path / "out", RUN, manifest)
    config = make_data_config("rollout", max_staleness=8)
    batcher, copy_batcher = Batcher(store, RUN, config), Batcher(copy, RUN, config)
    for step in (1, 2):
        expected_batch = await claim_batch(store, batcher, step)
        actual_batch = await claim_batch(copy, copy_batcher, step)
        assert expected_batch is not None
        assert actual_batch is not None
        assert_same_batch(expected_batch, actual_batch)
    assert await claim_batch(copy, copy_batcher, 3) is None
    await copy.close()


async def test_batcher_on_a_dataset_uses_each_group_in_order_and_ends(
    store: Store, target: Store, tmp_path: Path
) -> None:
    """Sessions without a group come last, each as a group of one."""
    await import_dataset(store, target, tmp_path)
    batcher = Batcher(target, RUN, make_data_config("dataset:golden@1", steps=9))
    assert list_claimed_groups(await claim_batch(target, batcher, 1)) == [
        ("data/golden@1/000000", 0),
        ("data/golden@1/000001", 0),
    ]
    assert list_claimed_groups(await claim_batch(target, batcher, 2)) == [
        ("data/golden@1/000002", 0),
        ("data/golden@1/000003", 0),
    ]
    assert list_claimed_groups(await claim_batch(target, batcher, 3)) == [("data/golden@1/000004", 0)]
    assert await claim_batch(target, batcher, 4) is None
    assert await target.groups(RUN, Channel.TRAIN) == []


async def test_plan_is_full_when_the_dataset_has_no_more_groups(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    dataset_plan = await make_plan(
        target, make_data_config("dataset:golden@1", groups_per_step=8, advantage={})
    )
    assert (dataset_plan.batch.is_full, len(dataset_plan.groups), dataset_plan.groups_needed) == (True, 5, 8)
    mixed = [{"source": "rollout", "share": 0.25}, {"source": "dataset:golden@1", "share": 0.75}]
    config = make_data_config(mixed, groups_per_step=8, advantage={})
    await add_group(target, 0, [0.0, 1.0])
    assert not (await make_plan(target, config)).batch.is_full, "one of two rollout groups"
    await add_group(target, 1, [0.0, 1.0])
    assert (await make_plan(target, config)).batch.is_full
    missing_plan = await make_plan(
        target, make_data_config("dataset:missing@1", groups_per_step=8, advantage={})
    )
    assert not missing_plan.batch.is_full


async def test_batcher_on_a_dataset_ignores_staleness(store: Store, target: Store, tmp_path: Path) -> None:
    await import_dataset(store, target, tmp_path)
    batcher = Batcher(
        target, RUN, make_data_config("dataset:golden@1", mode="sync", advantage={"estimator": "grpo"})
    )
    batch = await batcher.next_batch(1, 0, version=77, is_finished=lambda: True)
    assert batch is not None
    assert len(batch.samples) == 4
    assert batch.report["data_samples"] == 4
    assert batch.report["staleness_max"] == 0
    assert {claim.staleness for claim in batch.claims} == {None}
    calls = await store.calls("s0-1")
    np.testing.assert_array_equal(batch.samples[1].logprobs[-3:], calls[0].logprobs)


async def test_batcher_with_two_epochs_uses_each_group_twice(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    config = make_data_config({"source": "dataset:golden@1", "epochs": 2}, groups_per_step=4)
    claimed_by_step = [
        list_claimed_groups(await claim_batch(target, Batcher(target, RUN, config), step))
        for step in (1, 2, 3)
    ]
    claimed = [(int(name[-1]), epoch) for groups in claimed_by_step for name, epoch in groups]
    assert claimed == [(index, epoch) for epoch in (0, 1) for index in range(5)]
    assert [len(groups) for groups in claimed_by_step] == [4, 4, 2]
    assert await claim_batch(target, Batcher(target, RUN, config), 4) is None


async def test_batcher_uses_a_group_at_most_once_per_step(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    batcher = Batcher(
        target, RUN, make_data_config({"source": "dataset:golden@1", "epochs": 9}, groups_per_step=8)
    )
    batches = [await claim_batch(target, batcher, step) for step in (1, 2)]
    assert [len(list_claimed_groups(batch)) for batch in batches] == [5, 5]


async def test_batcher_with_mixed_sources_follows_their_shares(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    for index in range(9):
        await add_group(target, index, [0.0, 1.0])
    mixed = [{"source": "rollout", "share": 0.75}, {"source": "dataset:golden@1", "share": 0.25}]
    config = make_data_config(mixed, groups_per_step=2, max_staleness=8)
    batcher = Batcher(target, RUN, config)
    claimed = [list_claimed_groups(await claim_batch(target, batcher, step)) for step in (1, 2, 3, 4)]
    rollout_counts = [sum(name.startswith("train/") for name, _ in groups) for groups in claimed]
    assert sum(rollout_counts) == 6
    assert [config.count_rollout_groups(step) for step in range(5)] == np.cumsum(
        [0, *rollout_counts]
    ).tolist()
    assert [name for groups in claimed for name, _ in groups if name.startswith("data/")] == [
        "data/golden@1/000000",
        "data/golden@1/000001",
    ]


async def test_batcher_with_mixed_sources_repeats_an_exhausted_dataset(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    for index in range(7):
        await add_group(target, index, [0.0, 1.0])
    mixed = [{"source": "rollout", "share": 0.5}, {"source": "dataset:golden@1", "share": 0.5}]
    batcher = Batcher(target, RUN, make_data_config(mixed, max_staleness=8))
    claimed = [list_claimed_groups(await claim_batch(target, batcher, step)) for step in range(1, 8)]
    epochs = [epoch for groups in claimed for name, epoch in groups if "golden" in name]
    assert epochs == [0, 0, 0, 0, 0, 1, 1]


async def test_batcher_with_mixed_sources_waits_for_rollout_groups(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    mixed = [{"source": "rollout", "share": 0.5}, {"source": "dataset:golden@1", "share": 0.5}]
    batcher = Batcher(target, RUN, make_data_config(mixed))
    assert await batcher.next_batch(1, 0, version=0, timeout=0.1) is None


async def test_batcher_after_released_steps_claims_the_same_groups(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    batcher = Batcher(target, RUN, make_data_config({"source": "dataset:golden@1", "epochs": 3}))
    batches = [await claim_batch(target, batcher, step) for step in (1, 2, 3)]
    assert await target.release_steps(RUN, after=1) == [2, 3]
    batcher.reset()
    for released, step in zip(batches[1:], (2, 3), strict=True):
        repeated = await claim_batch(target, batcher, step)
        assert list_claimed_groups(repeated) == list_claimed_groups(released)


async def test_repeated_training_import_changes_nothing(store: Store, target: Store, tmp_path: Path) -> None:
    await import_dataset(store, target, tmp_path)
    before = await target.sessions(RUN)
    manifest = await export_all(store, tmp_path / "again")
    result = await import_for_training(target, tmp_path / "again", RUN, "golden@1", manifest)
    assert (result.groups, result.sessions, result.unchanged) == (0, 0, 5)
    assert await target.sessions(RUN) == before
    second_import = await import_for_training(target, tmp_path / "again", RUN, "golden@2", manifest)
    assert second_import.groups == 5


async def test_training_import_keeps_the_original_sessions(store: Store, tmp_path: Path) -> None:
    manifest = await export_all(store, tmp_path / "out")
    await import_for_training(store, tmp_path / "out", RUN, "golden@1", manifest)
    (session,) = [
        row.session for row in await store.sessions(RUN) if row.session.session_id.startswith("s1-1.")
    ]
    assert session.metadata["imported_from"] == {"dataset": "golden@1", "run_id": RUN, "session_id": "s1-1"}
    assert (await export_all(store, tmp_path / "again")).hash == manifest.hash


async def test_training_import_skips_evaluation_sessions(store: Store, target: Store, tmp_path: Path) -> None:
    await add_session(store, "held-out", ["x"], 1.0, channel=Channel.VAL)
    manifest = await export_all(store, tmp_path / "out", where=SessionFilter(channel=Channel.VAL))
    result = await import_for_training(target, tmp_path / "out", RUN, "x@1", manifest)
    assert (result.groups, result.unchanged) == (0, 0)


async def test_training_import_makes_a_live_session_with_a_group_id_a_group_of_one(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await add_session(store, "live", ["x"], 1.0, channel=Channel.LIVE, group_id=f"{RUN}/train/000000")
    manifest = await export_all(store, tmp_path / "out", where=SessionFilter(ids=("live",)))
    result = await import_for_training(target, tmp_path / "out", RUN, "x@1", manifest)
    assert (result.groups, result.sessions) == (1, 1)
    (group,) = await target.groups(RUN, Channel.DATA)
    (row,) = await target.sessions(RUN)
    assert (row.session.group_id, row.session.slot, group.size) == (group.group_id, 0, 1)


async def test_training_import_without_logprobs_is_only_allowed_for_cross_entropy(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await store.open_session(make_session("no-logprobs", channel=Channel.LIVE))
    await store.add_calls(
        [make_call("no-logprobs#0", [1], [2], session_id="no-logprobs", logprobs=np.array([np.nan], "f4"))]
    )
    await store.end_session(
        "no-logprobs", SessionStatus.COMPLETED, None, [Reward("no-logprobs", 1.0, RewardSource.HUMAN)]
    )
    where = SessionFilter(ids=("no-logprobs",))
    manifest = await export_all(store, tmp_path / "out", where=where)
    with pytest.raises(DataError, match="no-logprobs lacks logprobs"):
        await import_for_training(target, tmp_path / "out", RUN, "x@1", manifest)
    await import_for_training(target, tmp_path / "out", RUN, "x@1", manifest, needs_logprobs=False)
    batcher = Batcher(
        target,
        RUN,
        make_data_config("dataset:x@1", loss={"name": "cross_entropy"}, advantage={"estimator": "reward"}),
    )
    batch = await claim_batch(target, batcher, 1)
    assert batch is not None
    assert batch.samples[0].token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "shares", [(1.0,), (0.7, 0.3), (0.5, 0.25, 0.25), (0.34, 0.33, 0.33), (0.999, 0.001)]
)
def test_count_groups_is_within_one_group_of_each_share(shares: tuple[float, ...]) -> None:
    previous = [0] * len(shares)
    for total in range(1, 300):
        counts = count_groups(shares, total)
        assert sum(counts) == total
        assert all(new >= old for new, old in zip(counts, previous, strict=True))
        assert all(abs(count - share * total) < 1 for count, share in zip(counts, shares, strict=True))
        previous = counts


async def test_batch_report_separates_dataset_rewards_from_rollout_rewards(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    await add_group(target, 0, [1.0, 0.0])
    mixed = [{"source": "rollout", "share": 0.5}, {"source": "dataset:golden@1", "share": 0.5}]
    batch = await claim_batch(target, Batcher(target, RUN, make_data_config(mixed)), 1)
    assert batch is not None
    rewards = [claim.reward for claim in batch.claims if str(claim.group_id).startswith(f"{RUN}/data/")]
    assert batch.report["data_reward_mean"] == pytest.approx(np.mean([r for r in rewards if r is not None]))
    assert (batch.report["reward_mean"], batch.report["sessions"]) == (0.5, 2)
    assert (batch.report["groups"], batch.report["data_sessions"]) == (2, len(rewards))


async def test_batcher_drops_dataset_samples_longer_than_max_context(
    store: Store, target: Store, tmp_path: Path
) -> None:
    await import_dataset(store, target, tmp_path)
    config = make_data_config("dataset:golden@1")
    complete_batch = await Batcher(target, RUN, config).preview(1, 0, 0)
    lengths = sorted(len(sample) for sample in complete_batch.samples)
    assert lengths[0] < lengths[-1]
    short_config = config.model_copy(
        update={"model": config.model.model_copy(update={"max_context": lengths[0]})}
    )
    batch = await claim_batch(target, Batcher(target, RUN, short_config), 1)
    assert batch is not None
    assert {len(sample) for sample in batch.samples} == {lengths[0]}
    assert batch.report["dropped"]["too_long"] == sum(length > lengths[0] for length in lengths)
