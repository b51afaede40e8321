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
from tests.unit.data.builders import RUN, add_group, begin
from tests.unit.trainer.harness import (
    FaultInjector,
    SimulatedCrash,
    TrainerHarness,
    fill,
    make_config,
    open_trainer,
)

STEP = [
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
"""What a step passes, in order. The second `submitted` puts its metrics down."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture
async def config(tmp_path: Path, model: Path) -> RunConfig:
    made = make_config(tmp_path / "run", model)
    await fill(made)
    return made


def with_trainer(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})


async def run_and_die(config: RunConfig, point: str, times: int) -> None:
    async with open_trainer(config, FaultInjector(point, times)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()


async def assert_committed(harness: TrainerHarness, steps: int) -> None:
    rows = await harness.store.steps(RUN)
    assert [(row.step, row.state) for row in rows] == [
        (number, StepState.COMMITTED) for number in range(1, steps + 1)
    ]


async def test_a_step_goes_through_its_states(config: RunConfig) -> None:
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        assert harness.faults.reached == ["released", *STEP * 3]
        await assert_committed(harness, 3)
        rows = await harness.store.steps(RUN)
        assert [row.version for row in rows] == [1, 2, 3]
        assert (await harness.engine.status()).version == 3
        kept = [path.name for path in sorted((config.run_dir / "checkpoints").iterdir())]
        assert kept == ["step-000002", "step-000003"]
        assert [path.name for path in sorted((config.run_dir / "policies").iterdir())] == [
            "v000002",
            "v000003",
        ]
        assert harness.trainer.doing == "finished"


Learned = tuple[list[tuple[int | None, str, float | None]], str]
"""What was claimed, and the hash of the adapter."""


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    config = make_config(tmp_path_factory.mktemp("undisturbed"), model)

    async def train() -> Learned:
        await fill(config)
        async with open_trainer(config) as harness:
            await harness.trainer.run()
            return await harness.claims(), await harness.head_hash()

    return asyncio.run(train())


@pytest.mark.parametrize(("point", "times"), [(p, 2) for p in dict.fromkeys(STEP)] + [("submitted", 3)])
async def test_recovers_from_every_state(
    config: RunConfig,
    undisturbed: Learned,
    point: str,
    times: int,
) -> None:
    await run_and_die(config, point, times)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        await assert_committed(harness, 3)
        assert (await harness.claims(), await harness.head_hash()) == undisturbed
        assert await harness.store.reserved_versions(RUN) == []
        assert [step for _, step in await harness.store.published_policies(RUN)] == [1, 2, 3], (
            "each step once"
        )
        head = await harness.store.latest_policy(RUN)
        assert (await harness.engine.status()).version == head.version
        assert [record["step"] for record in read_steps(config.run_dir)] == [1, 2, 3]


@pytest.mark.parametrize("point", ["tombstoned", "released"])
async def test_recovers_from_a_recovery_cut_short(
    config: RunConfig, undisturbed: Learned, point: str
) -> None:
    every_two = with_trainer(config, checkpoint_every=2)
    await run_and_die(every_two, "published", 1)
    await run_and_die(every_two, point, 1)
    async with open_trainer(every_two) as harness:
        await harness.trainer.recover()
        assert (await harness.store.latest_policy(RUN)).version == 0, (
            "what was published and not saved is given up"
        )
        await harness.trainer.run()
        await assert_committed(harness, 3)
        assert (await harness.claims(), await harness.head_hash()) == undisturbed


@pytest.mark.parametrize("times", [1, 2])
async def test_one_checkpoint_saves_all_steps_before_it(config: RunConfig, times: int) -> None:
    """Whichever row of the two was written when the process died."""
    every_two = with_trainer(config, checkpoint_every=2, steps=2)
    await run_and_die(every_two, "saved" if times == 1 else "committed", 1)
    async with open_trainer(every_two) as harness:
        await harness.trainer.run()
        await assert_committed(harness, 2)
        assert harness.faults.reached.count("forward_backward") == 0, "nothing is trained again"


async def test_versions_of_unsaved_steps_are_given_up(config: RunConfig) -> None:
    every_two = with_trainer(config, checkpoint_every=2, keep_checkpoints=1, steps=4)
    # Of three each in steps 1 and 3, and two in step 2, the last: version 3 is out and version 2 pruned.
    await run_and_die(every_two, "submitted", 8)
    async with open_trainer(every_two) as harness:
        await harness.trainer.recover()
        head = await harness.store.latest_policy(RUN)
        assert head.version == 2
        assert "v000002" in [path.name for path in (config.run_dir / "policies").iterdir()], (
            "pruning keeps what a recovery needs"
        )
        assert (await harness.engine.status()).version == 2
        await harness.trainer.run()
        rows = await harness.store.steps(RUN)
        assert [row.version for row in rows] == [1, 2, 4, 5], "3 is not used again"
        await assert_committed(harness, 4)


async def test_an_engine_that_holds_a_version_given_up_gets_the_base_again(config: RunConfig) -> None:
    every_two = with_trainer(config, checkpoint_every=2)
    async with open_trainer(every_two, FaultInjector("submitted", 3)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
        assert (await harness.engine.status()).version == 1
        harness.faults.point = ""
        await harness.trainer.recover()
        assert (await harness.engine.status()).version == 0


async def test_a_checkpoint_that_no_row_names_does_not_push_out_the_good_one(config: RunConfig) -> None:
    every_three = with_trainer(config, checkpoint_every=3, keep_checkpoints=1)
    await run_and_die(every_three, "saved", 1)
    orphan = checkpoint_path(config.run_dir, 9)
    orphan.mkdir()
    async with open_trainer(every_three) as harness:
        await harness.trainer.run()
        assert not orphan.exists()
        assert checkpoint_path(config.run_dir, 3).is_dir()


async def test_a_checkpoint_that_is_gone_is_named(config: RunConfig) -> None:
    await run_and_die(config, "saved", 1)
    (config.run_dir / "checkpoints").rename(config.run_dir / "elsewhere")
    async with open_trainer(config) as harness:
        with pytest.raises(InstarError, match="step-000001, which does not exist"):
            await harness.trainer.run()


async def test_numbers_that_are_not_finite_stop_the_run(config: RunConfig) -> None:
    wild = with_trainer(config, adam=config.trainer.adam.model_copy(update={"lr": 1e30, "grad_clip_norm": 0}))
    async with open_trainer(wild) as harness:
        with pytest.raises(NonFiniteError, match=r"is (nan|inf)"):
            await harness.trainer.run()
        rows = await harness.store.steps(RUN)
        assert [row.state for row in rows] == [StepState.COMMITTED, StepState.SUBMITTED]
        assert (await harness.store.latest_policy(RUN)).version == 1
    async with open_trainer(config) as harness:
        await harness.trainer.recover()
        assert len(await harness.store.steps(RUN)) == 1, "the claim is given back"


async def test_stop_finishes_and_saves_the_step(config: RunConfig) -> None:
    rarely = with_trainer(config, checkpoint_every=100)
    async with open_trainer(rarely) as harness:
        running = asyncio.create_task(harness.trainer.run())
        while "forward_backward" not in harness.faults.reached:  # noqa: ASYNC110 — a test's view from outside
            await asyncio.sleep(0.001)
        harness.trainer.stop()
        await running
        done = harness.trainer.step
        assert 1 <= done < 3
        await assert_committed(harness, done)
    async with open_trainer(rarely) as harness:
        await harness.trainer.run()
        assert harness.faults.reached.count("forward_backward") == 3 - done
        await assert_committed(harness, 3)


async def test_stop_while_waiting_for_data_saves_what_was_trained(config: RunConfig) -> None:
    rarely = with_trainer(config, checkpoint_every=100, steps=50)
    async with open_trainer(rarely) as harness:
        harness.trainer.is_rollout_finished = False
        running = asyncio.create_task(harness.trainer.run())
        while not (harness.trainer.step == 6 and "waiting" in harness.trainer.doing):  # noqa: ASYNC110 — same
            await asyncio.sleep(0.005)
        harness.trainer.stop()
        async with asyncio.timeout(10):
            await running
        await assert_committed(harness, 6)
        rows = await harness.store.steps(RUN)
        assert [row.version for row in rows] == [1, 2, 3, 4, 5, 6], "nothing is published twice"


async def test_trains_what_is_left_when_rollout_has_ended(config: RunConfig) -> None:
    more = with_trainer(config, steps=50, groups_per_step=4)
    async with open_trainer(more) as harness:
        await harness.trainer.run()
        claims = await harness.store.claims(RUN)
        groups = {step: {c.group_id for c in claims if c.step == step} for step in (1, 2)}
        assert [len(groups[1]), len(groups[2])] == [4, 2]
        await assert_committed(harness, 2)


async def test_metrics_are_written_for_people_and_tools(config: RunConfig) -> None:
    async with open_trainer(with_trainer(config, tensorboard=True)) as harness:
        await harness.trainer.run()
    records = list(read_metrics(config.run_dir))
    assert [(record["kind"], record["step"]) for record in records] == [("train", n) for n in (1, 2, 3)]
    wanted = {"loss", "grad_norm", "reward_mean", "version", "samples", "step_seconds", "elapsed", "lr"}
    assert wanted <= records[0].keys()
    (events,) = (config.run_dir / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents")
    assert b"train/reward_mean" in events.read_bytes()


async def test_readers_pass_over_a_line_cut_short(config: RunConfig) -> None:
    async with open_trainer(config) as harness:
        await harness.trainer.run()
    with (config.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert [record["step"] for record in read_steps(config.run_dir)] == [1, 2, 3]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", ["forward_backward", "optim_step", "state written", "artifact written"])
async def test_a_lost_session_is_begun_again(
    config: RunConfig, undisturbed: Learned, point: str, times: int
) -> None:
    async with open_trainer(config, FaultInjector(point, times, BackendLost)) as harness:
        await harness.trainer.run()
        await assert_committed(harness, 3)
        assert (await harness.claims(), await harness.head_hash()) == undisturbed
        assert any("lost" in line for line in harness.log)


async def test_a_session_lost_over_and_over_ends_the_run(config: RunConfig) -> None:
    async with open_trainer(config) as harness:

        async def lose(*_: object) -> None:
            raise BackendLost("gone")

        harness.backend.forward_backward = lose  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(BackendLost):
            await harness.trainer.run()
        assert len([line for line in harness.log if "lost" in line]) == 5


async def test_a_sampler_is_exported_again_before_it_expires(config: RunConfig) -> None:
    async with open_trainer(with_trainer(config, steps=50)) as harness:
        harness.backend.keep_seconds = 0.6
        harness.trainer.is_rollout_finished = False
        running = asyncio.create_task(harness.trainer.run())
        while (first := await harness.store.latest_policy(RUN)).version < 6:  # noqa: ASYNC110 - the trainer tells nobody
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        again = await harness.store.latest_policy(RUN)
        harness.trainer.stop()
        await running
        assert again.version == first.version == 6
        assert first.artifact.expires_at is not None
        assert again.artifact.expires_at is not None
        assert again.artifact.expires_at > first.artifact.expires_at


@pytest.mark.parametrize(
    ("point", "times", "every"), [("optim_step", 3, 4), ("artifact written", 3, 4), ("reserved", 2, 1)]
)
async def test_a_crash_makes_nothing_too_old(
    tmp_path: Path, model: Path, point: str, times: int, every: int
) -> None:
    """Every group is one version behind the step that trains it, which is all that is allowed."""
    config = make_config(tmp_path / "run", model, steps=4, max_staleness=1, checkpoint_every=every)
    store = SqliteStore(config.store_path)
    await begin(store)
    for index in range(4):
        await add_group(store, index, [1.0, 0.0, 0.25], version=max(0, index - 1))
    await store.close()
    await run_and_die(config, point, times)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        claims = await harness.store.claims(RUN)
        assert [(claim.reason, claim.staleness) for claim in claims] == [(None, 0)] * 3 + [(None, 1)] * 9


class ImpatientTrainer(Trainer):
    """Stops waiting for a batch at once, as if a sampler had to be exported again."""

    def _batch_timeout(self) -> float | None:
        return 0.0


class FinishingRolloutBatcher(Batcher):
    """Lets the rollout add its last group and finish just after the store was read."""

    trainer: Trainer

    async def _load_ready(self, *arguments: Any) -> Any:
        groups = await super()._load_ready(*arguments)
        if not self.trainer.is_rollout_finished:
            await add_group(self.store, 0, [1.0, 0.0])
            self.trainer.is_rollout_finished = True
        return groups


async def test_trainer_trains_groups_that_end_when_the_rollout_does(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path / "run", model)
    await fill(config, groups=0)
    async with open_trainer(config, trainer_class=ImpatientTrainer) as harness:
        trainer = harness.trainer
        trainer.is_rollout_finished = False
        trainer.batcher = batcher = FinishingRolloutBatcher(harness.store, RUN, config)
        batcher.trainer = trainer
        await trainer.run()
        assert trainer.step == 1
