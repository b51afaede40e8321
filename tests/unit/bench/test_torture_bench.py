"""Tests for bench/torture.py: a small sample of its simulated schedules, and its state file."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """The module bench/torture_parts/schedules.py, imported with bench/ on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("torture_parts.schedules")
    module.disable_logging()
    yield module
    logging.disable(logging.NOTSET)
    for name in [name for name in sys.modules if name.split(".")[0] == "torture_parts"]:
        del sys.modules[name]


@pytest.fixture
def folder(schedules: ModuleType) -> Generator[Path]:
    with schedules.make_temporary_folder() as path:
        yield Path(path)


def test_simulation_sample_of_schedules_has_no_violations(schedules: ModuleType, folder: Path) -> None:
    simulator = schedules.Simulator(folder)
    sample: list[Any] = [
        *list(simulator.make_crash_schedules())[::400],
        *map(simulator.make_random_schedule, range(8)),
    ]
    for schedule in sample:
        outcome = simulator.run(schedule)
        assert not outcome.violations, f"{schedule}: {outcome.violations} after {outcome.crashes}"


def test_simulation_same_schedule_makes_same_decisions(schedules: ModuleType, folder: Path) -> None:
    simulator = schedules.Simulator(folder)
    schedule = next(s for s in map(simulator.make_random_schedule, range(100)) if len(s.faults) > 2)
    first, second = simulator.run(schedule), simulator.run(schedule)
    assert first.crashes
    assert (first.trace, first.crashes, first.weights) == (second.trace, second.crashes, second.weights)


def test_simulation_killed_process_runs_no_finally_block(schedules: ModuleType) -> None:
    from torture_parts.world import Fault, Scheduler, World  # pyright: ignore[reportMissingImports]

    events: list[str] = []

    class Writer:
        def __init__(self, world: Any) -> None:
            self.world = world

        async def run(self) -> None:
            events.append("started")
            try:
                await self.world.pass_gate("write")
                events.append("written")
            finally:
                events.append("finally")

    world = World(Scheduler(None, [Fault(1, None)]), lambda world, _: Writer(world), ["writer"], ["writer"])
    world.loop.run_until_complete(world.run())
    assert events == ["started", "started", "written", "finally"]
    world.loop.cancel_all()
    world.loop.close()


@pytest.mark.parametrize("name", ["recovery does not load the checkpoint", "a version number is used again"])
def test_simulation_finds_injected_bug(schedules: ModuleType, folder: Path, name: str) -> None:
    from torture_parts.bugs import BUGS  # pyright: ignore[reportMissingImports]

    (bug,) = [bug for bug in BUGS if bug.name == name]
    simulator = schedules.Simulator(folder, bug.components)
    assert any(simulator.run(simulator.make_random_schedule(seed)).violations for seed in range(40))


def test_planted_bugs_override_methods_that_exist(schedules: ModuleType) -> None:
    """A bug whose method was renamed in the product is not planted any more."""
    from torture_parts import bugs  # pyright: ignore[reportMissingImports]

    classes = [
        value
        for value in vars(bugs).values()
        if isinstance(value, type) and value.__module__ == bugs.__name__
    ]
    changes = {
        f"{planted.__name__}.{name}": any(hasattr(base, name) for base in planted.__bases__)
        for planted in classes
        if planted is not bugs.PlantedBug
        for name, value in vars(planted).items()
        if callable(value)
    }
    assert len(changes) >= len(bugs.BUGS) - 1, "one bug is defined elsewhere"
    assert [name for name, exists in changes.items() if not exists] == []


def test_state_file_keeps_complete_rows_until_the_sources_change(
    schedules: ModuleType, tmp_path: Path
) -> None:
    from torture_parts.state import StateFile  # pyright: ignore[reportMissingImports]

    path = tmp_path / "state" / "kills.jsonl"
    StateFile(path).append({"number": 0})
    with path.open("a") as file:
        file.write('{"number": 1')
    state = StateFile(path)
    assert state.rows == [{"number": 0}]
    state.append({"number": 1})
    assert StateFile(path).rows == [{"number": 0}, {"number": 1}]
    _, rest = path.read_text().split("\n", 1)
    path.write_text('{"sources": "different"}\n' + rest)
    assert StateFile(path).rows == []
