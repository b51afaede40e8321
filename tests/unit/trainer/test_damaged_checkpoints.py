"""Tests that damaged checkpoints are reported, and that the run resumes from the newest intact one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from instar.config import RunConfig
from instar.errors import InstarError
from instar.trainer.checkpoint import checkpoint_path
from instar.types import StepState
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN
from tests.unit.trainer.harness import (
    FaultInjector,
    SimulatedCrash,
    TrainerHarness,
    fill_store,
    make_config,
    open_trainer,
)

STATE_FILE = "backend/state.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


TrainingResult = tuple[list[tuple[int | None, str, float | None]], str]
"""The claims and the hash of the adapter."""


async def train(config: RunConfig) -> TrainingResult:
    await fill_store(config)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        return await harness.list_claims(), await harness.hash_latest_adapter()


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    return asyncio.run(train(make_config(tmp_path_factory.mktemp("uninterrupted"), model, steps=4)))


@pytest.fixture
async def trained_config(tmp_path: Path, model: Path) -> RunConfig:
    """The config of a run that has trained three of its four steps."""
    await train(make_config(tmp_path / "run", model, steps=3))
    return make_config(tmp_path / "run", model, steps=4)


def flip_bit(path: Path) -> None:
    content = bytearray((path / STATE_FILE).read_bytes())
    content[-100] ^= 1
    (path / STATE_FILE).write_bytes(content)


def truncate(path: Path) -> None:
    with (path / STATE_FILE).open("r+b") as file:
        file.truncate(1000)


DAMAGES: dict[str, Damage] = {
    STATE_FILE: flip_bit,
    "state.safetensors: ": truncate,
    "backend/state.json": lambda path: (path / "backend/state.json").unlink(),
    "trainer.json": lambda path: (path / "trainer.json").write_text("{"),
    "does not exist": shutil.rmtree,
}
"""Functions that damage a checkpoint, by the text that the warning must contain."""


async def assert_trained_once(harness: TrainerHarness, uninterrupted: TrainingResult) -> None:
    rows = await harness.store.steps(RUN)
    assert [(row.step, row.state) for row in rows] == [(step, StepState.COMMITTED) for step in (1, 2, 3, 4)]
    assert (await harness.list_claims(), await harness.hash_latest_adapter()) == uninterrupted
    assert [row.version for row in rows] == [1, 2, 4, 5], "version 3 contains the lost weights"
    assert (await harness.engine.status()).version == 5


@pytest.mark.parametrize("expected", DAMAGES)
async def test_recovery_with_damaged_checkpoint_uses_the_previous_one(
    trained_config: RunConfig, uninterrupted: TrainingResult, expected: str
) -> None:
    DAMAGES[expected](checkpoint_path(trained_config.run_dir, 3))
    async with open_trainer(trained_config) as harness:
        await harness.trainer.run()
        await assert_trained_once(harness, uninterrupted)
        assert harness.faults.reached.count("optim_step") == 2, "steps 3 and 4"
        [warning] = [line for line in harness.log if "damaged" in line]
        assert "step-000003" in warning
        assert expected in warning
        assert "steps [3] are lost" in warning
        assert "resuming after step 2" in harness.log


@pytest.mark.parametrize("point", ["tombstoned", "released"])
async def test_trainer_recovers_from_crash_during_recovery(
    trained_config: RunConfig, uninterrupted: TrainingResult, point: str
) -> None:
    flip_bit(checkpoint_path(trained_config.run_dir, 3))
    async with open_trainer(trained_config, FaultInjector(point)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.recover()
    async with open_trainer(trained_config) as harness:
        await harness.trainer.run()
        await assert_trained_once(harness, uninterrupted)


async def test_recovery_republishes_pruned_weights(tmp_path: Path, model: Path) -> None:
    """The only intact checkpoint is that of step 2, whose policy files were already deleted."""
    settings = {"checkpoint_every": 2, "keep_checkpoints": 2}
    config = make_config(tmp_path / "run", model, steps=5, **settings)
    await train(config)
    flip_bit(checkpoint_path(config.run_dir, 5))
    assert not (config.run_dir / "policies" / "v000002").exists()
    flip_bit(checkpoint_path(config.run_dir, 4))
    reference = make_config(tmp_path / "reference", model, steps=2, **settings)
    _, expected = await train(reference)
    shutil.copytree(checkpoint_path(reference.run_dir, 2), checkpoint_path(config.run_dir, 2))
    async with open_trainer(config, FaultInjector("released")) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.recover()
    async with open_trainer(config) as harness:
        await harness.trainer.recover()
        assert (await harness.store.latest_policy(RUN)).version == 2
        assert await harness.hash_latest_adapter() == expected
        assert (await harness.engine.status()).version == 2


async def test_recovery_without_an_intact_checkpoint_names_the_damaged_file(
    trained_config: RunConfig,
) -> None:
    for step in (2, 3):
        truncate(checkpoint_path(trained_config.run_dir, step))
    async with open_trainer(trained_config) as harness:
        with pytest.raises(InstarError, match=f"step-000003.*{STATE_FILE}.*no older checkpoint is intact"):
            await harness.trainer.run()
        states = [row.state for row in await harness.store.steps(RUN)]
        assert states == [StepState.COMMITTED] * 3, "nothing is released"


async def test_damaged_checkpoint_is_kept_for_inspection(trained_config: RunConfig) -> None:
    flip_bit(checkpoint_path(trained_config.run_dir, 3))
    damaged = (checkpoint_path(trained_config.run_dir, 3) / STATE_FILE).read_bytes()
    async with open_trainer(trained_config) as harness:
        await harness.trainer.run()
    assert (trained_config.run_dir / "damaged" / "step-000003" / STATE_FILE).read_bytes() == damaged


async def test_checkpoint_without_hashes_is_loaded(trained_config: RunConfig) -> None:
    """Earlier versions of Instar wrote no hashes."""
    (checkpoint_path(trained_config.run_dir, 3) / "hashes.json").unlink()
    async with open_trainer(trained_config) as harness:
        await harness.trainer.recover()
        assert harness.trainer.step == 3
