"""Exported data as what a run trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.cli.plan import make_plan
from instar.config import RunConfig
from instar.config.data import count_groups
from instar.data.batcher import Batcher, StepBatch
from instar.datasets.importing import import_sessions
from instar.datasets.training_import import import_for_training
from instar.errors import DataError
from instar.store.base import SessionFilter, Store
from instar.store.sqlite import SqliteStore
from instar.types import Channel, Reward, RewardSource, SessionStatus
from tests.unit.data.builders import RUN, add_group, begin, make_call, make_config, make_session
from tests.unit.datasets.harness import add_session, export_all, fill_store

GOLDEN = "data/golden@1/00000"


@pytest.fixture
async def store(tmp_path: Path):
    opened = SqliteStore(tmp_path / "store.db")
    await fill_store(opened, groups=4)
    yield opened
    await opened.close()


@pytest.fixture
async def empty(tmp_path: Path):
    opened = SqliteStore(tmp_path / "other.db")
    await begin(opened)
    yield opened
    await opened.close()


def make(data: Any, **trainer: Any) -> RunConfig:
    config = make_config(**{"groups_per_step": 2, "advantage": {"estimator": "running"}, **trainer})
    return RunConfig.model_validate({**config.model_dump(), "data": data})


async def bring(store: Store, empty: Store, tmp_path: Path, label: str = "golden@1") -> None:
    manifest = await export_all(store, tmp_path / label)
    await import_for_training(empty, tmp_path / label, RUN, label, manifest)


async def train(store: Store, batcher: Batcher, step: int) -> StepBatch | None:
    batch = await batcher.next_batch(step, 0, version=step - 1, is_finished=lambda: True)
    if batch is not None:
        await store.drop_samples(batch.drops)
        await store.claim_step(RUN, step, batch.claims)
    return batch


def places(batch: StepBatch | None) -> list[tuple[str, int]]:
    assert batch is not None
    found = {(str(claim.group_id).removeprefix(f"{RUN}/"), claim.epoch): None for claim in batch.claims}
    return list(found)


def assert_same_batch(one: StepBatch, other: StepBatch) -> None:
    assert len(one.samples) == len(other.samples) > 0
    for left, right in zip(one.samples, other.samples, strict=True):
        for name in ("token_ids", "mask", "logprobs", "advantages", "versions"):
            assert getattr(left, name).tobytes() == getattr(right, name).tobytes(), name
        assert left.spans == right.spans
        assert left.sample_key == right.sample_key
    assert one.claims == other.claims
    assert one.report == other.report


async def test_an_import_makes_the_same_batches(store: Store, tmp_path: Path) -> None:
    manifest = await export_all(store, tmp_path / "out", format="parquet")
    copy = SqliteStore(tmp_path / "copy.db")
    await begin(copy)
    await import_sessions(copy, tmp_path / "out", RUN, manifest)
    config = make("live", max_staleness=8)
    one, other = Batcher(store, RUN, config), Batcher(copy, RUN, config)
    for step in (1, 2):
        mine, theirs = await train(store, one, step), await train(copy, other, step)
        assert mine is not None
        assert theirs is not None
        assert_same_batch(mine, theirs)
    assert await train(copy, other, 3) is None
    await copy.close()


async def test_exported_data_is_trained_in_its_order_and_used_up(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    """Ungrouped sessions come last, each as a group of one."""
    await bring(store, empty, tmp_path)
    batcher = Batcher(empty, RUN, make("dataset:golden@1", steps=9))
    assert places(await train(empty, batcher, 1)) == [
        ("data/golden@1/000000", 0),
        ("data/golden@1/000001", 0),
    ]
    assert places(await train(empty, batcher, 2)) == [
        ("data/golden@1/000002", 0),
        ("data/golden@1/000003", 0),
    ]
    assert places(await train(empty, batcher, 3)) == [(f"{GOLDEN}4", 0)]
    assert await train(empty, batcher, 4) is None
    assert await empty.groups(RUN, Channel.TRAIN) == []


async def test_the_plan_does_not_wait_for_data_that_is_used_up(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await bring(store, empty, tmp_path)
    alone = await make_plan(empty, make("dataset:golden@1", groups_per_step=8, advantage={}))
    assert (alone.batch.is_full, len(alone.groups), alone.groups_needed) == (True, 5, 8)
    mixed = [{"source": "live", "share": 0.25}, {"source": "dataset:golden@1", "share": 0.75}]
    config = make(mixed, groups_per_step=8, advantage={})
    await add_group(empty, 0, [0.0, 1.0])
    assert not (await make_plan(empty, config)).batch.is_full, "one of two live groups"
    await add_group(empty, 1, [0.0, 1.0])
    assert (await make_plan(empty, config)).batch.is_full
    nothing = await make_plan(empty, make("dataset:gone@1", groups_per_step=8, advantage={}))
    assert not nothing.batch.is_full


async def test_age_is_nothing_to_it(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    batcher = Batcher(empty, RUN, make("dataset:golden@1", mode="sync", advantage={"estimator": "grpo"}))
    batch = await batcher.next_batch(1, 0, version=77, is_finished=lambda: True)
    assert batch is not None
    assert len(batch.samples) == 4
    assert batch.report["data_samples"] == 4
    assert batch.report["staleness_max"] == 0
    assert {claim.staleness for claim in batch.claims} == {None}
    own = await store.calls("s0-1")
    np.testing.assert_array_equal(batch.samples[1].logprobs[-3:], own[0].logprobs)


async def test_epochs(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    config = make({"source": "dataset:golden@1", "epochs": 2}, groups_per_step=4)
    seen = [places(await train(empty, Batcher(empty, RUN, config), step)) for step in (1, 2, 3)]
    flat = [(int(name[-1]), epoch) for step in seen for name, epoch in step]
    assert flat == [(index, epoch) for epoch in (0, 1) for index in range(5)]
    assert [len(step) for step in seen] == [4, 4, 2]
    assert await train(empty, Batcher(empty, RUN, config), 4) is None


async def test_a_group_is_in_a_step_once(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    batcher = Batcher(empty, RUN, make({"source": "dataset:golden@1", "epochs": 9}, groups_per_step=8))
    first, second = await train(empty, batcher, 1), await train(empty, batcher, 2)
    assert [len(places(step)) for step in (first, second)] == [5, 5]


async def test_live_and_exported_data_have_their_shares(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    for index in range(9):
        await add_group(empty, index, [0.0, 1.0])
    mixed = [{"source": "live", "share": 0.75}, {"source": "dataset:golden@1", "share": 0.25}]
    config = make(mixed, groups_per_step=2, max_staleness=8)
    batcher = Batcher(empty, RUN, config)
    seen = [places(await train(empty, batcher, step)) for step in (1, 2, 3, 4)]
    live = [sum(name.startswith("train/") for name, _ in step) for step in seen]
    assert sum(live) == 6
    assert [config.count_live_groups(step) for step in range(5)] == np.cumsum([0, *live]).tolist()
    assert [name for step in seen for name, _ in step if name.startswith("data/")] == [
        "data/golden@1/000000",
        "data/golden@1/000001",
    ]


async def test_mixed_data_begins_again_when_it_is_used_up(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    for index in range(7):
        await add_group(empty, index, [0.0, 1.0])
    mixed = [{"source": "live", "share": 0.5}, {"source": "dataset:golden@1", "share": 0.5}]
    batcher = Batcher(empty, RUN, make(mixed, max_staleness=8))
    seen = [places(await train(empty, batcher, step)) for step in range(1, 8)]
    assert [epoch for step in seen for name, epoch in step if "golden" in name] == [0, 0, 0, 0, 0, 1, 1]


async def test_a_step_waits_for_its_live_groups(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    mixed = [{"source": "live", "share": 0.5}, {"source": "dataset:golden@1", "share": 0.5}]
    batcher = Batcher(empty, RUN, make(mixed))
    assert await batcher.next_batch(1, 0, version=0, timeout=0.1) is None


async def test_a_released_step_is_made_again_the_same(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    batcher = Batcher(empty, RUN, make({"source": "dataset:golden@1", "epochs": 3}))
    batches = [await train(empty, batcher, step) for step in (1, 2, 3)]
    assert await empty.release_steps(RUN, after=1) == [2, 3]
    batcher.reset()
    for before, step in zip(batches[1:], (2, 3), strict=True):
        again = await train(empty, batcher, step)
        assert places(again) == places(before)


async def test_bringing_it_twice_changes_nothing(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    before = await empty.sessions(RUN)
    manifest = await export_all(store, tmp_path / "again")
    brought = await import_for_training(empty, tmp_path / "again", RUN, "golden@1", manifest)
    assert (brought.groups, brought.sessions, brought.unchanged) == (0, 0, 5)
    assert await empty.sessions(RUN) == before
    other = await import_for_training(empty, tmp_path / "again", RUN, "golden@2", manifest)
    assert other.groups == 5


async def test_the_store_may_have_it_as_what_it_was(store: Store, tmp_path: Path) -> None:
    manifest = await export_all(store, tmp_path / "out")
    await import_for_training(store, tmp_path / "out", RUN, "golden@1", manifest)
    (session,) = [
        row.session for row in await store.sessions(RUN) if row.session.session_id.startswith("s1-1.")
    ]
    assert session.metadata["imported_from"] == {"dataset": "golden@1", "run_id": RUN, "session_id": "s1-1"}
    assert (await export_all(store, tmp_path / "again")).hash == manifest.hash


async def test_evaluation_is_not_trained_on(store: Store, empty: Store, tmp_path: Path) -> None:
    await add_session(store, "held-out", ["x"], 1.0, channel=Channel.VAL)
    manifest = await export_all(store, tmp_path / "out", where=SessionFilter(channel=Channel.VAL))
    brought = await import_for_training(empty, tmp_path / "out", RUN, "x@1", manifest)
    assert (brought.groups, brought.unchanged) == (0, 0)


async def test_missing_logprobs_are_for_cross_entropy_alone(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await store.open_session(make_session("bare", channel=Channel.LIVE))
    await store.add_calls(
        [make_call("bare#0", [1], [2], session_id="bare", logprobs=np.array([np.nan], "f4"))]
    )
    await store.end_session("bare", SessionStatus.COMPLETED, None, [Reward("bare", 1.0, RewardSource.HUMAN)])
    where = SessionFilter(ids=("bare",))
    manifest = await export_all(store, tmp_path / "out", where=where)
    with pytest.raises(DataError, match="bare lacks logprobs"):
        await import_for_training(empty, tmp_path / "out", RUN, "x@1", manifest)
    await import_for_training(empty, tmp_path / "out", RUN, "x@1", manifest, needs_logprobs=False)
    batcher = Batcher(
        empty, RUN, make("dataset:x@1", loss={"name": "cross_entropy"}, advantage={"estimator": "reward"})
    )
    batch = await train(empty, batcher, 1)
    assert batch is not None
    assert batch.samples[0].token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "shares", [(1.0,), (0.7, 0.3), (0.5, 0.25, 0.25), (0.34, 0.33, 0.33), (0.999, 0.001)]
)
def test_nobody_is_ever_a_place_behind_its_share(shares: tuple[float, ...]) -> None:
    before = [0] * len(shares)
    for groups in range(1, 300):
        counts = count_groups(shares, groups)
        assert sum(counts) == groups
        assert all(new >= old for new, old in zip(counts, before, strict=True))
        assert all(abs(count - share * groups) < 1 for count, share in zip(counts, shares, strict=True))
        before = counts


async def test_its_rewards_are_not_reported_as_the_policys(
    store: Store, empty: Store, tmp_path: Path
) -> None:
    await bring(store, empty, tmp_path)
    await add_group(empty, 0, [1.0, 0.0])
    mixed = [{"source": "live", "share": 0.5}, {"source": "dataset:golden@1", "share": 0.5}]
    batch = await train(empty, Batcher(empty, RUN, make(mixed)), 1)
    assert batch is not None
    rewards = [claim.reward for claim in batch.claims if str(claim.group_id).startswith(f"{RUN}/data/")]
    assert batch.report["data_reward_mean"] == pytest.approx(np.mean([r for r in rewards if r is not None]))
    assert (batch.report["reward_mean"], batch.report["sessions"]) == (0.5, 2)
    assert (batch.report["groups"], batch.report["data_sessions"]) == (2, len(rewards))


async def test_what_the_model_has_no_room_for_is_dropped(store: Store, empty: Store, tmp_path: Path) -> None:
    await bring(store, empty, tmp_path)
    config = make("dataset:golden@1")
    whole = await Batcher(empty, RUN, config).preview(1, 0, 0)
    lengths = sorted(len(sample) for sample in whole.samples)
    assert lengths[0] < lengths[-1]
    room = config.model_copy(update={"model": config.model.model_copy(update={"max_context": lengths[0]})})
    batch = await train(empty, Batcher(empty, RUN, room), 1)
    assert batch is not None
    assert {len(sample) for sample in batch.samples} == {lengths[0]}
    assert batch.report["dropped"]["too_long"] == sum(length > lengths[0] for length in lengths)
