from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from instar.config import RunConfig
from instar.data.batcher import Batcher
from instar.errors import BackendLost, InstarError, NonFiniteError
from instar.store.sqlite import SqliteStore
from instar.trainer.checkpoint import checkpoint_path
from instar.trainer.loop import Trainer
from instar.trainer.monitor import read_metrics, read_steps
from instar.types import StepState
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, add_group, put_test_run
from tests.unit.trainer.harness import (
    FaultInjector,
    SimulatedCrash,
    TrainerHarness,
    fill_store,
    make_config,
    open_trainer,
)

STEP_POINTS = [
    "claimed",
    "submitted",
    "forward_backward",
    "optim_step",
    "submitted",
    "state written",
    "saved",
    "reserved",
    "artifact written",
    "published",
    "committed",
]
"""The points that a step reaches, in order. The second `submitted` stores the step's metrics."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture
async def config(tmp_path: Path, model: Path) -> RunConfig:
    config = make_config(tmp_path / "run", model)
    await fill_store(config)
    return config


def with_trainer_settings(config: RunConfig, **settings: object) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=settings)})


async def run_until_crash(config: RunConfig, point: str, occurrence: int) -> None:
    async with open_trainer(config, FaultInjector(point, occurrence)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()


async def assert_committed(harness: TrainerHarness, steps: int) -> None:
    rows = await harness.store.steps(RUN)
    assert [(row.step, row.state) for row in rows] == [
        (number, StepState.COMMITTED) for number in range(1, steps + 1)
    ]


async def test_trainer_step_passes_all_states_in_order(config: RunConfig) -> None:
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        assert harness.faults.reached == ["released", *STEP_POINTS * 3]
        await assert_committed(harness, 3)
        rows = await harness.store.steps(RUN)
        assert [row.version for row in rows] == [1, 2, 3]
        assert (await harness.engine.status()).version == 3
        checkpoints = [path.name for path in sorted((config.run_dir / "checkpoints").iterdir())]
        assert checkpoints == ["step-000002", "step-000003"]
        assert [path.name for path in sorted((config.run_dir / "policies").iterdir())] == [
            "v000002",
            "v000003",
        ]
        assert harness.trainer.activity == "finished"


async def test_recovery_pushes_the_published_version_before_the_rollout_can_continue(
    config: RunConfig,
) -> None:
    """The rollout starts new groups as soon as the step has a version, and the engine must then serve it."""
    await run_until_crash(config, "published", 2)
    async with open_trainer(config, FaultInjector("saved")) as harness:
        with pytest.raises(SimulatedCrash):  # the version is recorded in the row of the saved step
            await harness.trainer.run()
        assert (await harness.engine.status()).version == 2


TrainingResult = tuple[list[tuple[int | None, str, float | None]], str]
"""The claims and the hash of the adapter."""


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    config = make_config(tmp_path_factory.mktemp("uninterrupted"), model)

    async def train() -> TrainingResult:
        await fill_store(config)
        async with open_trainer(config) as harness:
            await harness.trainer.run()
            return await harness.list_claims(), await harness.hash_latest_adapter()

    return asyncio.run(train())


@pytest.mark.parametrize(
    ("point", "occurrence"), [(p, 2) for p in dict.fromkeys(STEP_POINTS)] + [("submitted", 3)]
)
async def test_trainer_recovers_from_crash_at_every_point(
    config: RunConfig,
    uninterrupted: TrainingResult,
    point: str,
    occurrence: int,
) -> None:
    await run_until_crash(config, point, occurrence)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        await assert_committed(harness, 3)
        assert (await harness.list_claims(), await harness.hash_latest_adapter()) == uninterrupted
        assert await harness.store.reserved_versions(RUN) == []
        assert [step for _, step in await harness.store.published_policies(RUN)] == [1, 2, 3], (
            "each step is published once"
        )
        head = await harness.store.latest_policy(RUN)
        assert (await harness.engine.status()).version == head.version
        assert [record["step"] for record in read_steps(config.run_dir)] == [1, 2, 3]


@pytest.mark.parametrize("point", ["tombstoned", "released"])
async def test_trainer_recovers_from_crash_during_recovery(
    config: RunConfig, uninterrupted: TrainingResult, point: str
) -> None:
    every_two = with_trainer_settings(config, checkpoint_every=2)
    await run_until_crash(every_two, "published", 1)
    await run_until_crash(every_two, point, 1)
    async with open_trainer(every_two) as harness:
        await harness.trainer.recover()
        assert (await harness.store.latest_policy(RUN)).version == 0, (
            "a published but unsaved version is discarded"
        )
        await harness.trainer.run()
        await assert_committed(harness, 3)
        assert (await harness.list_claims(), await harness.hash_latest_adapter()) == uninterrupted


@pytest.mark.parametrize("point", ["saved", "committed"])
async def test_checkpoint_commits_all_earlier_steps_after_crash(config: RunConfig, point: str) -> None:
    """The crash happens after the checkpoint is recorded or after the first step is committed."""
    every_two = with_trainer_settings(config, checkpoint_every=2, steps=2)
    await run_until_crash(every_two, point, 1)
    async with open_trainer(every_two) as harness:
        await harness.trainer.run()
        await assert_committed(harness, 2)
        assert harness.faults.reached.count("forward_backward") == 0, "nothing is trained again"


async def test_recovery_discards_versions_of_unsaved_steps(config: RunConfig) -> None:
    every_two = with_trainer_settings(config, checkpoint_every=2, keep_checkpoints=1, steps=4)
    # The eighth `submitted` is in step 3: steps 1 and 3 have three each, step 2 has two. By then,
    # version 3 is published and old versions are pruned.
    await run_until_crash(every_two, "submitted", 8)
    async with open_trainer(every_two) as harness:
        await harness.trainer.recover()
        head = await harness.store.latest_policy(RUN)
        assert head.version == 2
        assert "v000002" in [path.name for path in (config.run_dir / "policies").iterdir()], (
            "the version that recovery needs is not pruned"
        )
        assert (await harness.engine.status()).version == 2
        await harness.trainer.run()
        rows = await harness.store.steps(RUN)
        assert [row.version for row in rows] == [1, 2, 4, 5], "version 3 is not reused"
        await assert_committed(harness, 4)


async def test_recovery_reloads_base_into_engine_with_discarded_version(config: RunConfig) -> None:
    every_two = with_trainer_settings(config, checkpoint_every=2)
    async with open_trainer(every_two, FaultInjector("submitted", 3)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
        assert (await harness.engine.status()).version == 1
        harness.faults.point = ""
        await harness.trainer.recover()
        assert (await harness.engine.status()).version == 0


async def test_recovery_prunes_orphaned_checkpoint_and_keeps_valid_one(config: RunConfig) -> None:
    every_three = with_trainer_settings(config, checkpoint_every=3, keep_checkpoints=1)
    await run_until_crash(every_three, "saved", 1)
    orphan = checkpoint_path(config.run_dir, 9)
    orphan.mkdir()
    async with open_trainer(every_three) as harness:
        await harness.trainer.run()
        assert not orphan.exists()
        assert checkpoint_path(config.run_dir, 3).is_dir()


async def test_recovery_with_missing_checkpoint_names_it(config: RunConfig) -> None:
    await run_until_crash(config, "saved", 1)
    (config.run_dir / "checkpoints").rename(config.run_dir / "moved")
    async with open_trainer(config) as harness:
        with pytest.raises(InstarError, match=r"step-000001 is damaged or missing \(it does not exist"):
            await harness.trainer.run()


async def test_trainer_with_non_finite_loss_raises(config: RunConfig) -> None:
    diverging = with_trainer_settings(
        config, adam=config.trainer.adam.model_copy(update={"lr": 1e30, "grad_clip_norm": 0})
    )
    async with open_trainer(diverging) as harness:
        with pytest.raises(NonFiniteError, match=r"is (nan|inf)"):
            await harness.trainer.run()
        rows = await harness.store.steps(RUN)
        assert [row.state for row in rows] == [StepState.COMMITTED, StepState.SUBMITTED]
        assert (await harness.store.latest_policy(RUN)).version == 1
    async with open_trainer(config) as harness:
        await harness.trainer.recover()
        assert len(await harness.store.steps(RUN)) == 1, "the claim is released"


async def test_stop_during_step_finishes_and_saves_it(config: RunConfig) -> None:
    rare_checkpoints = with_trainer_settings(config, checkpoint_every=100)
    async with open_trainer(rare_checkpoints) as harness:
        trainer_task = asyncio.create_task(harness.trainer.run())
        while "forward_backward" not in harness.faults.reached:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.001)
        harness.trainer.stop()
        await trainer_task
        steps_done = harness.trainer.step
        assert 1 <= steps_done < 3
        await assert_committed(harness, steps_done)
    async with open_trainer(rare_checkpoints) as harness:
        await harness.trainer.run()
        assert harness.faults.reached.count("forward_backward") == 3 - steps_done
        await assert_committed(harness, 3)


async def test_stop_while_waiting_for_data_saves_trained_steps(config: RunConfig) -> None:
    rare_checkpoints = with_trainer_settings(config, checkpoint_every=100, steps=50)
    async with open_trainer(rare_checkpoints) as harness:
        harness.trainer.is_rollout_finished = False
        trainer_task = asyncio.create_task(harness.trainer.run())
        while not (harness.trainer.step == 6 and "waiting" in harness.trainer.activity):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)
        harness.trainer.stop()
        async with asyncio.timeout(10):
            await trainer_task
        await assert_committed(harness, 6)
        rows = await harness.store.steps(RUN)
        assert [row.version for row in rows] == [1, 2, 3, 4, 5, 6], "nothing is published twice"


async def test_trainer_after_rollout_trains_remaining_groups(config: RunConfig) -> None:
    large_steps = with_trainer_settings(config, steps=50, groups_per_step=4)
    async with open_trainer(large_steps) as harness:
        await harness.trainer.run()
        claims = await harness.store.claims(RUN)
        groups = {step: {c.group_id for c in claims if c.step == step} for step in (1, 2)}
        assert [len(groups[1]), len(groups[2])] == [4, 2]
        await assert_committed(harness, 2)


async def test_trainer_writes_metrics_file_and_tensorboard_events(config: RunConfig) -> None:
    async with open_trainer(with_trainer_settings(config, tensorboard=True)) as harness:
        await harness.trainer.run()
    records = list(read_metrics(config.run_dir))
    assert [(record["kind"], record["step"]) for record in records] == [("train", n) for n in (1, 2, 3)]
    expected_keys = {
        "loss",
        "grad_norm",
        "reward_mean",
        "version",
        "samples",
        "step_seconds",
        "elapsed",
        "lr",
    }
    assert expected_keys <= records[0].keys()
    (events,) = (config.run_dir / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents")
    assert b"train/reward_mean" in events.read_bytes()


async def test_read_steps_skips_truncated_line(config: RunConfig) -> None:
    async with open_trainer(config) as harness:
        await harness.trainer.run()
    with (config.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert [record["step"] for record in read_steps(config.run_dir)] == [1, 2, 3]


@pytest.mark.parametrize("occurrence", [1, 2])
@pytest.mark.parametrize("point", ["forward_backward", "optim_step", "state written", "artifact written"])
async def test_trainer_restarts_lost_backend_session(
    config: RunConfig, uninterrupted: TrainingResult, point: str, occurrence: int
) -> None:
    async with open_trainer(config, FaultInjector(point, occurrence, BackendLost)) as harness:
        await harness.trainer.run()
        await assert_committed(harness, 3)
        assert (await harness.list_claims(), await harness.hash_latest_adapter()) == uninterrupted
        assert any("lost" in line for line in harness.log)


async def test_trainer_stops_after_repeated_backend_loss(config: RunConfig) -> None:
    async with open_trainer(config) as harness:

        async def raise_lost(*_: object) -> None:
            raise BackendLost("gone")

        harness.backend.forward_backward = raise_lost  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(BackendLost):
            await harness.trainer.run()
        assert len([line for line in harness.log if "lost" in line]) == 5


async def test_trainer_republishes_policy_before_it_expires(config: RunConfig) -> None:
    async with open_trainer(with_trainer_settings(config, steps=50)) as harness:
        harness.backend.artifact_lifetime_seconds = 0.6
        harness.trainer.is_rollout_finished = False
        trainer_task = asyncio.create_task(harness.trainer.run())
        while (first := await harness.store.latest_policy(RUN)).version < 6:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        renewed = await harness.store.latest_policy(RUN)
        harness.trainer.stop()
        await trainer_task
        assert renewed.version == first.version == 6
        assert first.artifact.expires_at is not None
        assert renewed.artifact.expires_at is not None
        assert renewed.artifact.expires_at > first.artifact.expires_at


@pytest.mark.parametrize(
    ("point", "occurrence", "checkpoint_every"),
    [("optim_step", 3, 4), ("artifact written", 3, 4), ("reserved", 2, 1)],
)
async def test_crash_does_not_increase_staleness(
    tmp_path: Path, model: Path, point: str, occurrence: int, checkpoint_every: int
) -> None:
    """Every group but the first has a staleness of 1, which is the limit."""
    config = make_config(tmp_path / "run", model, steps=4, max_staleness=1, checkpoint_every=checkpoint_every)
    store = SqliteStore(config.store_path)
    await put_test_run(store)
    for index in range(4):
        await add_group(store, index, [1.0, 0.0, 0.25], version=max(0, index - 1))
    await store.close()
    await run_until_crash(config, point, occurrence)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        claims = await harness.store.claims(RUN)
        assert [(claim.reason, claim.staleness) for claim in claims] == [(None, 0)] * 3 + [(None, 1)] * 9


class ImpatientTrainer(Trainer):
    """A trainer that does not wait for batches, as if its policy had to be renewed immediately."""

    def _batch_timeout(self) -> float | None:
        return 0.0


class FinishingRolloutBatcher(Batcher):
    """A batcher that adds the last group and finishes the rollout right after reading the store."""

    trainer: Trainer

    async def _load_ready(self, *arguments: Any) -> Any:
        groups = await super()._load_ready(*arguments)
        if not self.trainer.is_rollout_finished:
            await add_group(self.store, 0, [1.0, 0.0])
            self.trainer.is_rollout_finished = True
        return groups


async def test_trainer_trains_group_added_as_rollout_finishes(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path / "run", model)
    await fill_store(config, groups=0)
    async with open_trainer(config, trainer_class=ImpatientTrainer) as harness:
        trainer = harness.trainer
        trainer.is_rollout_finished = False
        trainer.batcher = batcher = FinishingRolloutBatcher(harness.store, RUN, config)
        batcher.trainer = trainer
        await trainer.run()
        assert trainer.step == 1
