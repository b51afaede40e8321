"""An in-process trainer with a real store and backend, which can be made to fail at chosen points."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from instar.backends.base import ForwardBackwardResult, OptimStepResult
from instar.backends.local.backend import LocalBackend
from instar.backends.local.state import hash_adapter
from instar.config import AdamConfig, LossConfig, RunConfig
from instar.engines.base import Engine
from instar.engines.scripted import ScriptedEngine
from instar.store.sqlite import SqliteStore
from instar.sync.files import FileSync
from instar.trainer.live import LineageTrainer, LiveTrainer
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor
from instar.trainer.publishing import PolicyPublisher
from instar.types import Artifact, Claim, Policy, Sample, StepState
from tests.unit.data.builders import RUN, add_group, put_test_run

T = TypeVar("T", bound=Trainer)
R = TypeVar("R", bound=Trainer | LiveTrainer)


class SimulatedCrash(Exception):
    """Simulates a crash of the trainer process."""


@dataclass
class FaultInjector:
    """Records the points that are reached, and raises ``error`` when ``point`` is reached for the
    ``occurrence``-th time."""

    point: str = ""
    occurrence: int = 1
    error: type[Exception] = SimulatedCrash
    reached: list[str] = field(default_factory=list[str])

    def reach(self, point: str) -> None:
        self.reached.append(point)
        if point == self.point and self.reached.count(point) == self.occurrence:
            raise self.error(point)


class FaultyStore(SqliteStore):
    def __init__(self, path: Path, faults: FaultInjector) -> None:
        super().__init__(path)
        self.faults = faults

    async def claim_step(
        self, policy_id: str, step: int, claims: Sequence[Claim], *, run_id: str | None = None
    ) -> frozenset[str]:
        forgotten = await super().claim_step(policy_id, step, claims, run_id=run_id)
        self.faults.reach("claimed")
        return forgotten

    async def advance_step(self, policy_id: str, step: int, state: StepState, **changes: Any) -> None:
        await super().advance_step(policy_id, step, state, **changes)
        self.faults.reach(state.value)

    async def reserve_version(self, policy_id: str, run_id: str, step: int, **lineage: Any) -> int:
        version = await super().reserve_version(policy_id, run_id, step, **lineage)
        self.faults.reach("reserved")
        return version

    async def publish(self, policy: Policy) -> None:
        await super().publish(policy)
        self.faults.reach("published")

    async def tombstone(self, policy_id: str, version: int, reason: str) -> None:
        await super().tombstone(policy_id, version, reason)
        self.faults.reach("tombstoned")

    async def release_steps(self, policy_id: str, after: int, *, include_saved: bool = False) -> list[int]:
        released = await super().release_steps(policy_id, after, include_saved=include_saved)
        self.faults.reach("released")
        return released


class FaultyBackend(LocalBackend):
    def __init__(self, config: RunConfig, faults: FaultInjector) -> None:
        super().__init__(config.model, config.backend, seed=config.seed)
        self.faults = faults
        self.initial_state = config.run_dir / "initial_state"
        self.trained_sessions: list[str] = []
        """The sessions of all samples that were trained on."""

    async def start(self) -> None:
        """Save the initial state when the run starts, and load it when the run is restarted."""
        if self.initial_state.exists():
            await self.load_state(self.initial_state)
        else:
            await super().save_state(self.initial_state)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        result = await super().forward_backward(samples, loss)
        self.trained_sessions += [sample.session_id for sample in samples]
        self.faults.reach("forward_backward")
        return result

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        result = await super().optim_step(adam)
        self.faults.reach("optim_step")
        return result

    async def save_state(self, path: Path) -> None:
        await super().save_state(path)
        self.faults.reach("state written")

    async def publish(self, path: Path) -> Artifact:
        artifact = await super().publish(path)
        self.faults.reach("artifact written")
        if self.artifact_lifetime_seconds is not None:
            return Artifact(
                artifact.kind, artifact.path, expires_at=time.time() + self.artifact_lifetime_seconds
            )
        return artifact


@dataclass
class TrainerHarness(Generic[R]):
    trainer: R
    store: FaultyStore
    backend: FaultyBackend
    engine: ScriptedEngine
    faults: FaultInjector
    log: list[str]

    async def list_claims(self) -> list[tuple[int | None, str, float | None]]:
        """Return the step, sample key and advantage of each claim."""
        return sorted((c.step, c.sample_key, c.advantage) for c in await self.store.claims(RUN))

    async def hash_latest_adapter(self, policy_id: str = RUN) -> str:
        return hash_adapter(Path((await self.store.latest_policy(policy_id)).artifact.path))


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def capture_log() -> Generator[list[str]]:
    """Collect the trainer's log messages, even if another test has configured Instar's logging."""
    logger, handler = logging.getLogger("instar.trainer"), _ListHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def make_config(folder: Path, model: Path, **trainer: Any) -> RunConfig:
    """Return a config for a run whose groups are all in the store before training starts. ``sync`` is not a
    setting of the trainer, but of weight transfers."""
    sync = trainer.pop("sync", {})
    defaults = {
        "steps": 3,
        "groups_per_step": 1,
        "max_staleness": 100,
        "adam": {"lr": 1e-2},
        "updates_per_step": 1,
        "loss": {"name": "importance_sampling"},
        "tensorboard": False,
    }
    return RunConfig.model_validate(
        {
            "name": RUN,
            "dir": folder,
            "model": {"name": str(model), "dtype": "fp32", "device": "cpu"},
            "engine": {"type": "scripted"},
            "backend": {"type": "local", "lora": {"rank": 4}, "threads": 1},
            "trainer": defaults | trainer,
            "sync": sync,
        }
    )


async def fill_store(config: RunConfig, groups: int = 6) -> None:
    store = SqliteStore(config.store_path)
    await put_test_run(store)
    for index in range(groups):
        await add_group(store, index, [1.0, 0.0, 0.25 * (index % 3)])
    await store.close()


@asynccontextmanager
async def open_trainer(
    config: RunConfig, faults: FaultInjector | None = None, trainer_class: type[T] = Trainer
) -> AsyncGenerator[TrainerHarness[T]]:
    """Open a new trainer on the run's store and folder, as a restart does."""
    async with open_harness(config, faults, lambda create: create(trainer_class, config)) as harness:
        harness.trainer.is_rollout_finished = True
        yield harness


@asynccontextmanager
async def open_live_trainer(
    config: RunConfig, faults: FaultInjector | None = None
) -> AsyncGenerator[TrainerHarness[LiveTrainer]]:
    """Open a new trainer of all learning agents' policies on the run's store and folder."""

    def create_all(create: CreateTrainer) -> LiveTrainer:
        lineages = [create(LineageTrainer, config.select_agent(agent)) for agent in config.trained_agents]
        return LiveTrainer(config, lineages[0].backend, lineages)

    async with open_harness(config, faults, create_all) as harness:
        yield harness


class CreateTrainer(Protocol):
    def __call__(self, trainer_class: type[T], config: RunConfig) -> T: ...


@asynccontextmanager
async def open_harness(
    config: RunConfig, faults: FaultInjector | None, make_trainer: Callable[[CreateTrainer], R]
) -> AsyncGenerator[TrainerHarness[R]]:
    faults = faults or FaultInjector()
    store = FaultyStore(config.store_path, faults)
    backend = FaultyBackend(config, faults)
    engine = ScriptedEngine(config.model, config.engine)  # pyright: ignore[reportArgumentType]

    async def list_engines() -> list[Engine]:
        return [engine]

    with ExitStack() as resources:

        def create(trainer_class: type[T], config: RunConfig) -> T:
            agent = next(iter(config.trained_agents), None)
            monitor = Monitor(config.run_dir, tensorboard=config.trainer.tensorboard, agent=agent)
            return trainer_class(
                config,
                store=store,
                backend=backend,
                publisher=PolicyPublisher(FileSync(), list_engines, every=config.sync.every),
                monitor=resources.enter_context(closing(monitor)),
            )

        try:
            with capture_log() as log:
                yield TrainerHarness(make_trainer(create), store, backend, engine, faults, log)
        finally:
            await backend.close()
            await engine.close()
            await store.close()
