"""Generate the schedules of a simulation and run them."""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instar.config import RunConfig
from instar.store.base import Run
from instar.store.sessions import put_run, take_lease
from torture_parts.event_loop import virtual_time
from torture_parts.fakes import Weights
from torture_parts.invariants import Invariants
from torture_parts.roles import FINISHING_ROLES, ROLE_NAMES, RUN, Components, RunSetup, create_role
from torture_parts.simulated_store import clear_database, create_database
from torture_parts.world import Fault, Scheduler, World

MAX_FAULTS = 4
REPLACE_PROBABILITY = 0.2
"""The probability that a fault replaces the process, which then continues without its lease."""
FAULT_WEIGHTS = {"trainer": 5, "gateway": 3, "rollout": 3, "rewards": 2, "engine": 2, "": 1}
"""The relative frequency of faults in each process of random schedules. An empty name means all processes."""


@dataclass(frozen=True)
class Scenario:
    name: str
    trainer_settings: dict[str, Any]
    rollout_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    turns: int = 2
    scores_in_background: bool = False
    agent_can_fail: bool = False
    compares_weights: bool = False
    """True if the final weights must equal those of the undisturbed schedule."""


SCENARIOS = (
    Scenario("sync", {"mode": "sync", "steps": 3, "keep_checkpoints": 1}, compares_weights=True),
    Scenario(
        "async",
        {"max_staleness": 1, "steps": 4, "checkpoint_every": 2, "keep_checkpoints": 1},
        turns=1,
        scores_in_background=True,
    ),
    Scenario(
        "refill",
        {"max_staleness": 1, "steps": 2, "groups_per_step": 2},
        {"group_policy": "refill", "refills": 1, "concurrency": 3},
        turns=1,
        agent_can_fail=True,
    ),
    Scenario(
        "drop",
        {"mode": "sync", "steps": 2},
        {"group_policy": "drop"},
        turns=1,
        scores_in_background=True,
        agent_can_fail=True,
        compares_weights=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of events and faults, fully determined by these fields."""

    scenario_index: int
    seed: int | None
    """The seed of the order of events. With None, gates open in the order in which they are reached."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    schedule: Schedule
    violations: list[str]
    decisions: int
    """The number of decisions that the scheduler made."""
    crashes: list[str]
    trace: str
    """A hash of all decisions."""
    weights: Weights | None
    """The final weights, or None if their files are missing."""


class Simulator:
    """Runs schedules one after another, with one database and one folder."""

    def __init__(self, folder: Path, components: Components | None = None) -> None:
        self._components = components or Components()
        self._database = create_database()
        self._configs = [make_config(scenario, folder / scenario.name) for scenario in SCENARIOS]
        self._undisturbed: dict[int, Outcome] = {}

    def run_undisturbed(self, scenario_index: int) -> Outcome:
        """Return the cached outcome of the scenario without faults, with gates in order."""
        if scenario_index not in self._undisturbed:
            self._undisturbed[scenario_index] = self.run(Schedule(scenario_index, None))
        return self._undisturbed[scenario_index]

    def run(self, schedule: Schedule) -> Outcome:
        scenario, config = SCENARIOS[schedule.scenario_index], self._configs[schedule.scenario_index]
        shutil.rmtree(config.run_dir, ignore_errors=True)
        clear_database(self._database)
        world = World(
            Scheduler(schedule.seed, schedule.faults),
            lambda world, name: create_role(setup, world, name),
            ROLE_NAMES,
            FINISHING_ROLES,
            lambda name: take_lease(self._database, RUN, name),
        )
        invariants = Invariants(self._database, config, world.report)
        put_run(self._database, Run(RUN, RUN, {}, created_at=1.0))
        store_class = self._components.store_class
        setup = RunSetup(
            config,
            scenario.turns,
            scenario.scores_in_background,
            scenario.agent_can_fail,
            self._components,
            lambda world: store_class(world, self._database, invariants.on_commit),
            invariants.acknowledge,
            ExitStack(),
        )
        with setup.resources, virtual_time(world.loop, schedule.seed or 0):
            try:
                world.loop.run_until_complete(world.run())
                if not world.violations:
                    invariants.check_end()
            except RuntimeError as error:
                world.report(f"the run stopped: {error}")
            weights = invariants.read_final_weights()
            violations = list(world.violations)
            world.loop.cancel_all()
        world.loop.close()
        if schedule.faults or schedule.seed is not None:
            expected = self.run_undisturbed(schedule.scenario_index) if scenario.compares_weights else None
            if expected is not None and not violations and weights != expected.weights:
                violations.append("the final weights differ from those of the undisturbed run")
        return Outcome(schedule, violations, world.decisions, world.crashes, world.trace, weights)

    # --- schedules ---------------------------------------------------------------------------------

    def make_crash_schedules(self) -> Iterator[Schedule]:
        """For each gate of each scenario's undisturbed run, yield a schedule that kills the process waiting
        there and a schedule that kills all processes."""
        for scenario_index in range(len(SCENARIOS)):
            for decision in range(1, self.run_undisturbed(scenario_index).decisions + 1):
                yield Schedule(scenario_index, None, (Fault(decision, None),))
                yield Schedule(scenario_index, None, (Fault(decision, None, kills_all=True),))

    def make_random_schedule(self, seed: int) -> Schedule:
        """Return a schedule with a random order of events and up to MAX_FAULTS faults."""
        rng = random.Random(f"schedule {seed}")
        scenario_index = rng.randrange(len(SCENARIOS))
        decisions = self.run_undisturbed(scenario_index).decisions
        faults: list[Fault] = []
        for _ in range(rng.randint(0, MAX_FAULTS)):
            (name,) = rng.choices(list(FAULT_WEIGHTS), list(FAULT_WEIGHTS.values()))
            decision, replaces = rng.randint(1, int(1.2 * decisions)), rng.random() < REPLACE_PROBABILITY
            faults.append(Fault(decision, name or None, kills_all=not name, replaces=replaces and bool(name)))
        return Schedule(scenario_index, seed, tuple(faults))


def make_config(scenario: Scenario, folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": RUN,
            "dir": folder,
            "model": {"name": "simulated"},
            "engine": {"type": "scripted"},
            "trainer": {
                "groups_per_step": 1,
                "updates_per_step": 1,  # a sample must not be in the weights twice
                "tensorboard": False,
                **scenario.trainer_settings,
            },
            "rollout": {
                "tasks": {"type": "python", "function": "simulated:tasks"},
                "agent": {"type": "function", "function": "simulated:agent"},
                "group_size": 2,
                **scenario.rollout_settings,
            },
            "reward": {"type": "rule", "function": "simulated:rule"},
        }
    )


def make_temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder, in memory if possible, because every training step syncs files to disk."""
    shared_memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None)


def disable_logging() -> None:
    """Disable logging, because crashes are expected."""
    logging.disable(logging.CRITICAL)
