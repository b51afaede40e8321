"""Tests for the alarms about a run's metrics, and for what the trainer does after a collapse."""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from instar.config import RunConfig
from instar.errors import InstarError
from instar.trainer.alarms import WINDOW, Alarm, AlarmDetector
from instar.trainer.checkpoint import checkpoint_path
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor, read_steps, read_warnings
from instar.types import StepState
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN
from tests.unit.trainer.harness import (
    FaultInjector,
    SimulatedCrash,
    fill_store,
    make_config,
    open_trainer,
)
from tests.unit.trainer.test_publishing import SlowLiveSync

HEALTHY: dict[str, Any] = {
    "reward_mean": 0.5,
    "groups": 4,
    "zero_signal": 1,
    "identical_share": 0.2,
    "entropy": 0.6,
    "output_tokens_mean": 40.0,
    "output_repetition": 0.1,
    "kl": 0.002,
}
COLLAPSED = {"zero_signal": 4, "identical_share": 0.95}


class RecordedRun:
    """A run folder to which a test writes metrics."""

    def __init__(self, folder: Path) -> None:
        self.monitor = Monitor(folder)
        self.detector = AlarmDetector(folder)
        self._step = 0

    def record_steps(self, count: int = WINDOW, **metrics: Any) -> list[str]:
        """Record steps, check after each one, and return the names of all alarms."""
        alarms: list[Alarm] = []
        for index in range(count):
            self._step += 1
            # The reward varies a little, as in every run.
            values = HEALTHY | {"reward_mean": 0.4 + 0.2 * (index % 2)} | metrics
            self.monitor.record("train", self._step, values)
            alarms += self.detector.check()
        return [alarm.name for alarm in alarms]

    def restart_after(self, step: int) -> None:
        """Continue after this step, as a run does that crashed later and is resumed."""
        self._step = step

    def record_score(self, accuracy: float) -> list[str]:
        self.monitor.record("eval", self._step, {"mode": "greedy", "accuracy": accuracy})
        return [alarm.name for alarm in self.detector.check()]


@pytest.fixture
def run(tmp_path: Path) -> Generator[RecordedRun]:
    run = RecordedRun(tmp_path)
    yield run
    run.monitor.close()


def test_healthy_run_raises_no_alarm(run: RecordedRun) -> None:
    assert run.record_steps(5 * WINDOW) == []


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (COLLAPSED, "collapse"),
        ({"zero_signal": 4}, "no_signal"),
        ({"entropy": 0.01}, "entropy"),
        ({"output_tokens_mean": 400.0}, "length"),
        ({"output_repetition": 0.8}, "repetition"),
        ({"kl": 0.5}, "logprobs"),
        ({"kl": -0.5}, "logprobs"),
    ],
)
def test_changed_metric_raises_its_alarm_once(
    run: RecordedRun, metrics: dict[str, Any], expected: str
) -> None:
    assert run.record_steps() == []
    assert run.record_steps(2 * WINDOW, **metrics) == [expected]
    assert run.record_steps(2 * WINDOW) == []
    assert run.record_steps(2 * WINDOW, **metrics)[-1] == expected, "an alarm that has ended is raised again"


def test_solved_tasks_raise_no_alarm(run: RecordedRun) -> None:
    run.record_steps()
    solved = {**COLLAPSED, "reward_mean": 1.0, "entropy": 0.01}
    # The windows that still contain unsolved steps are not all solved.
    run.record_steps(WINDOW, **solved)
    assert run.record_steps(2 * WINDOW, **solved) == []


def test_rising_reward_raises_no_alarm(run: RecordedRun) -> None:
    run.record_steps(2 * WINDOW, reward_mean=0.2)
    alarms: list[str] = []
    for step in range(4 * WINDOW):
        alarms += run.record_steps(1, **COLLAPSED, entropy=0.01, reward_mean=0.2 + 0.01 * step)
    assert alarms == []


@pytest.mark.parametrize("seed", range(3))
def test_collapse_with_noisy_rewards_raises_each_alarm_once(run: RecordedRun, seed: int) -> None:
    rng = random.Random(seed)
    alarms: list[str] = []
    for step in range(200):
        metrics = {**COLLAPSED, "identical_share": 1.0, "entropy": 0.01} if step >= 2 * WINDOW else {}
        alarms += run.record_steps(1, **metrics, reward_mean=rng.choice([0.0, 0.2, 0.4, 0.6, 0.8]))
    assert sorted(alarms) == ["collapse", "entropy"]


def test_rewards_of_steps_that_are_trained_again_are_ignored(run: RecordedRun) -> None:
    """The policy does not improve, but would seem to if its reward were compared with abandoned steps."""
    run.record_steps(1, reward_mean=1.0)
    run.record_steps(WINDOW - 1, reward_mean=0.5)
    run.record_steps(2 * WINDOW, reward_mean=0.0)
    run.restart_after(step=WINDOW)
    assert run.record_steps(WINDOW, **COLLAPSED, reward_mean=0.5) == ["collapse"]


def test_steps_without_metrics_raise_no_alarm(run: RecordedRun) -> None:
    run.record_steps()
    assert run.record_steps(2 * WINDOW, **dict.fromkeys(HEALTHY)) == []


def test_falling_held_out_score_is_a_collapse(run: RecordedRun) -> None:
    for score in (0.4, 0.7, 0.6):
        assert run.record_score(score) == []
    assert run.record_score(0.5) == ["held_out_greedy"]


def test_rewind_clears_the_alarms(run: RecordedRun) -> None:
    run.record_steps()
    assert run.record_steps(WINDOW, **COLLAPSED) == ["collapse"]
    assert run.record_steps(1, rewound_to=3) == []
    assert run.record_steps(WINDOW - 1, **COLLAPSED) == []
    assert run.record_steps(1, **COLLAPSED) == ["collapse"]


def test_resumed_run_reads_its_history(run: RecordedRun, tmp_path: Path) -> None:
    run.record_steps()
    run.record_steps(WINDOW, **COLLAPSED)
    assert [alarm.name for alarm in AlarmDetector(tmp_path).check()] == ["collapse"]


# --- the trainer ---


class ScriptedAlarms(AlarmDetector):
    """Reports a collapse after the second step. The recent reward falls, so the first step is the best."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.checks = 0

    @property
    def recent_reward(self) -> float:
        return -float(self.checks)

    def check(self) -> list[Alarm]:
        self.checks += 1
        alarm = Alarm("collapse", "the policy has collapsed", is_collapse=True)
        return [alarm] if self.checks == 2 else []


class CollapsingTrainer(Trainer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.alarms = ScriptedAlarms(self.config.run_dir)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


async def make_run(folder: Path, model: Path, on_collapse: str) -> RunConfig:
    settings = {"on_collapse": on_collapse, "keep_checkpoints": 1, "max_kl": None}
    config = make_config(folder / "run", model, steps=4, **settings)
    await fill_store(config)
    return config


async def test_warn_only_records_a_warning(model: Path, tmp_path: Path) -> None:
    config = await make_run(tmp_path, model, "warn")
    async with open_trainer(config, trainer_class=CollapsingTrainer) as harness:
        await harness.trainer.run()
        assert len(await harness.store.steps(RUN)) == 4
    assert read_warnings(config.run_dir) == ["the policy has collapsed"]


async def test_stop_ends_the_run_with_the_reason(model: Path, tmp_path: Path) -> None:
    config = await make_run(tmp_path, model, "stop")
    async with open_trainer(config, trainer_class=CollapsingTrainer) as harness:
        with pytest.raises(InstarError, match=r"on_collapse stopped the run after step 2: the policy has"):
            await harness.trainer.run()
        rows = await harness.store.steps(RUN)
        assert [row.state for row in rows] == [StepState.COMMITTED] * 2


async def test_rewind_restores_the_best_checkpoint_and_halves_the_learning_rate(
    model: Path, tmp_path: Path
) -> None:
    config = await make_run(tmp_path, model, "rewind")
    async with open_trainer(config, trainer_class=CollapsingTrainer) as harness:
        await harness.trainer.run()
        rows = await harness.store.steps(RUN)
        assert [(row.step, row.state) for row in rows] == [(n, StepState.COMMITTED) for n in range(1, 5)]
        assert (await harness.engine.status()).version == rows[-1].version
        assert not [claim for claim in await harness.store.claims(RUN) if claim.step == 3]
    steps = read_steps(config.run_dir)
    assert [step.get("rewound_to") for step in steps] == [None, None, 1, None]
    assert [step["lr"] for step in steps if "lr" in step] == pytest.approx([1e-2, 1e-2, 5e-3])
    assert checkpoint_path(config.run_dir, 1).is_dir(), "the best checkpoint is kept"
    assert read_warnings(config.run_dir)[-1] == "step 3: restored step 1; the learning rate is scaled by 0.5"


async def test_rewind_updates_the_engines_even_if_no_update_is_due(model: Path, tmp_path: Path) -> None:
    settings = {"on_collapse": "rewind", "max_kl": None, "sync": {"every": 2}}
    config = make_config(tmp_path / "run", model, steps=4, **settings)
    await fill_store(config)
    async with open_trainer(config, trainer_class=CollapsingTrainer) as harness:
        harness.trainer.publisher.sync = sync = SlowLiveSync()
        await harness.trainer.run()
    assert sync.pushed == [0, 2, 3, 4], "step 3 is the rewind"


async def test_weights_after_a_rewind_equal_the_best_step(model: Path, tmp_path: Path) -> None:
    config = await make_run(tmp_path, model, "rewind")
    short = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 3})})
    async with open_trainer(short, trainer_class=CollapsingTrainer) as harness:
        await harness.trainer.run()
        rewound = await harness.hash_latest_adapter()
    undisturbed = make_config(tmp_path / "undisturbed", model, steps=1)
    await fill_store(undisturbed)
    async with open_trainer(undisturbed) as harness:
        await harness.trainer.run()
        assert await harness.hash_latest_adapter() == rewound


@pytest.mark.parametrize("point", ["claimed", "submitted", "state written", "saved", "published"])
async def test_run_that_crashes_during_a_rewind_can_be_resumed(
    model: Path, tmp_path: Path, point: str
) -> None:
    config = await make_run(tmp_path, model, "rewind")
    occurrence = 5 if point == "submitted" else 3
    faults = FaultInjector(point, occurrence)
    async with open_trainer(config, faults, CollapsingTrainer) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        rows = await harness.store.steps(RUN)
        assert [(row.step, row.state) for row in rows] == [(n, StepState.COMMITTED) for n in range(1, 5)]
