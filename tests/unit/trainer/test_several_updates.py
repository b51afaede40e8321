"""Tests for one or several updates per step: the KL of a step limits the learning rate, each update computes
a new gradient, and a resumed run continues with the same learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LossConfig, TrainerConfig
from instar.trainer.checkpoint import checkpoint_path, read_trainer_state
from instar.trainer.monitor import read_steps
from instar.trainer.update import MIN_LR_SCALE, KlLimiter, StepSamples, apply_updates, select_measured
from instar.types import Floats, Json, Sample
from tests.tiny import make_tiny_model
from tests.unit.trainer.harness import FaultInjector, SimulatedCrash, fill_store, make_config, open_trainer
from tests.unit.trainer.test_update import make_sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


def test_limiter_lowers_the_rate_quickly_and_raises_it_slowly() -> None:
    limiter = KlLimiter(0.01)
    limiter.adapt(0.04)
    assert limiter.lr_scale == pytest.approx(0.5)
    limiter.adapt(1.0)
    assert limiter.lr_scale == pytest.approx(0.25)
    for _ in range(3):
        limiter.adapt(0.0)
    assert limiter.lr_scale == pytest.approx(0.25 * 1.1**3)
    for _ in range(100):
        limiter.adapt(1e-4)
    assert limiter.lr_scale == 1.0


def test_limiter_without_maximum_keeps_the_rate() -> None:
    limiter = KlLimiter(None)
    limiter.adapt(100.0)
    assert limiter.lr_scale == 1.0


def test_limiter_keeps_a_minimum_rate() -> None:
    limiter = KlLimiter(0.01)
    for _ in range(50):
        limiter.adapt(1.0)
    assert limiter.lr_scale == MIN_LR_SCALE


class RoundingBackend(LocalBackend):
    """A backend that rounds differently in `forward` than in `forward_backward`."""

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return [logprobs + 0.5 for logprobs in await super().forward(samples)]


async def test_rounding_differences_are_not_measured_as_kl(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model)
    backend = RoundingBackend(config.model, config.backend, seed=0)  # pyright: ignore[reportArgumentType]
    limiter = KlLimiter(0.01)
    samples = [make_sample(str(index), 5) for index in range(10)]
    loss, adam = LossConfig(name="ppo"), AdamConfig(lr=1e-12)
    _, metrics = await apply_updates(backend, StepSamples(samples), loss, adam, 1, limiter)
    await backend.close()
    assert metrics["step_kl"] == pytest.approx(0.0, abs=1e-6)
    assert limiter.lr_scale == 1.0


async def train(folder: Path, model: Path, **trainer: object) -> tuple[str, list[float]]:
    """Return the hash of the trained adapter, and the KL of every step that measured it."""
    config = make_config(folder, model, **{"loss": {"name": "ppo"}, **trainer})
    await fill_store(config)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        digest = await harness.hash_latest_adapter()
    return digest, [step["step_kl"] for step in read_steps(config.run_dir) if "step_kl" in step]


async def test_kl_of_a_step_includes_all_its_updates(model: Path, tmp_path: Path) -> None:
    free_adapter, kls = await train(tmp_path / "free", model, max_kl=None)
    assert kls == []
    adapter_after_one, kls_of_one = await train(tmp_path / "one", model, max_kl=1e6)
    assert adapter_after_one == free_adapter
    adapter_after_two, kls_of_two = await train(tmp_path / "two", model, max_kl=1e6, updates_per_step=2)
    assert adapter_after_two != adapter_after_one
    assert len(kls_of_one) == len(kls_of_two) == 3
    assert kls_of_two[0] > 1.3 * kls_of_one[0] > 0


@pytest.mark.parametrize(("count", "interval"), [(0, 1), (3, 1), (8, 1), (9, 2), (16, 2), (48, 6), (50, 7)])
def test_kl_is_measured_on_few_samples_of_all_groups(count: int, interval: int) -> None:
    measured = select_measured([make_sample(str(index), 5) for index in range(count)])
    assert [int(sample.sample_key) for sample in measured] == list(range(0, count, interval))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 2),
        ({"loss": {"name": "cispo"}}, 2),
        ({"loss": {"name": "importance_sampling"}}, 1),
        ({"updates_per_step": 1}, 1),
        ({"loss": {"name": "cross_entropy"}, "updates_per_step": 3}, 3),
    ],
)
def test_default_number_of_updates_depends_on_loss(settings: Json, count: int) -> None:
    assert TrainerConfig.model_validate(settings).update_count == count


@pytest.mark.parametrize("updates", [1, 2])
async def test_kl_above_the_maximum_lowers_the_next_updates(
    model: Path, tmp_path: Path, updates: int
) -> None:
    _, free = await train(tmp_path / "free", model, updates_per_step=updates, max_kl=1e6)
    maximum = free[0] / 100
    _, limited = await train(tmp_path / "limited", model, updates_per_step=updates, max_kl=maximum)
    assert limited[0] == free[0]
    assert limited[-1] < free[-1] / 2


@pytest.mark.parametrize("updates", [1, 2])
async def test_imitation_is_not_limited(model: Path, tmp_path: Path, updates: int) -> None:
    settings = {"loss": {"name": "cross_entropy"}, "updates_per_step": updates}
    limited, _ = await train(tmp_path / "limited", model, max_kl=1e-9, **settings)
    free, _ = await train(tmp_path / "free", model, max_kl=None, **settings)
    assert limited == free


async def test_resumed_run_continues_with_the_same_learning_rate(model: Path, tmp_path: Path) -> None:
    settings = {"updates_per_step": 2, "max_kl": 1e-7}
    undisturbed, _ = await train(tmp_path / "undisturbed", model, **settings)
    config = make_config(tmp_path / "run", model, loss={"name": "ppo"}, **settings)
    await fill_store(config)
    async with open_trainer(config, FaultInjector("forward_backward", 4)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
    assert read_trainer_state(checkpoint_path(config.run_dir, 1)).kl_lr_scale == pytest.approx(0.5)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        assert await harness.hash_latest_adapter() == undisturbed
