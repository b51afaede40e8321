"""Tests that a run whose trainer or training service is killed at any moment trains every batch exactly once.

It must have the same claims and bit-identical weights as an undisturbed run and as a run without a service.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from instar.conformance.server import PROTOCOLS
from tests.integration.backends.environments import get_interpreter
from tests.tiny import make_tiny_model
from tests.torture.fork_server import ForkServer
from tests.torture.kill_switch import (
    RECOVERY_STEP,
    PlannedKill,
    count_fired_kills,
    write_other_pid,
    write_plan,
)
from tests.torture.run_process import Fingerprint
from tests.torture.service_points import RECOVERY_POINT_NAMES, STEP_POINT_NAMES, make_kill_points
from tests.torture.service_run import STEPS, ServiceProcess, ServiceRun
from tests.torture.test_crash import CONCURRENT_RUNS, ReportProgress, run_concurrently

MODULES = {
    "tinker": ("instar.backends.tinker", "tinker"),
    "mint": ("instar.backends.tinker", "tinker"),
    "weaver": ("instar.backends.weaver",),
}
"""The modules to import before forking trainers, by service. MinT's own module changes the environment, so
it is imported after the fork."""
KILL_COUNTS = {"tinker": 20, "weaver": 20, "mint": 12}
"""The number of kills at random moments, by service. Multiplied by INSTAR_KILLS, if set."""
TARGET_WEIGHTS = {"trainer": 3, "server": 1}
"""The relative frequency with which each process is killed."""
MAX_KILL_INTERVAL_FRACTION = 0.6
"""The longest time between two kills, as a fraction of the duration of an undisturbed run."""


@dataclass(frozen=True)
class RunSlot:
    """The resources of one concurrent run: a server that stays up and a fork server for its trainers."""

    service: str
    service_process: ServiceProcess
    trainer_fork_server: ForkServer
    model: Path

    def create_run(self, folder: Path) -> ServiceRun:
        folder.mkdir()
        return ServiceRun(folder, self.model, self.service, self.trainer_fork_server, self.service_process)


@pytest.fixture(scope="module")
def undisturbed_seconds(
    slots: list[RunSlot], reference: Fingerprint, tmp_path_factory: pytest.TempPathFactory
) -> float:
    """The duration of a run without kills, on a server that has warmed up."""
    seconds = 0.0
    for number in range(2):
        run = slots[0].create_run(tmp_path_factory.mktemp("undisturbed") / str(number))
        started_at = time.monotonic()
        run.start()
        run.finish()
        seconds = time.monotonic() - started_at
        assert run.read_fingerprint() == reference, run.collect_logs()
    return seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=256)


@pytest.fixture(scope="module")
def fork_servers() -> Generator[list[ForkServer]]:
    """The fork servers of the service processes, one for each concurrent run."""
    fork_servers = [
        ForkServer("tests.torture.service_server", "tests.torture.service_trainer", "peft")
        for _ in range(CONCURRENT_RUNS)
    ]
    yield fork_servers
    for fork_server in fork_servers:
        fork_server.close()


@pytest.fixture(scope="module")
def reference(
    model: Path, fork_servers: list[ForkServer], tmp_path_factory: pytest.TempPathFactory
) -> Fingerprint:
    """The fingerprint of a run without kills and without a service."""
    run = ServiceRun(tmp_path_factory.mktemp("reference"), model, "local", fork_servers[0], None)
    run.start()
    run.finish()
    fingerprint = run.read_fingerprint()
    assert {step for step, *_ in fingerprint.trained} == set(range(1, STEPS + 1)), "some step trained nothing"
    return fingerprint


@pytest.fixture(scope="module", params=list(PROTOCOLS))
def slots(
    request: pytest.FixtureRequest,
    model: Path,
    fork_servers: list[ForkServer],
    reference: Fingerprint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[list[RunSlot]]:
    service: str = request.param
    python = str(get_interpreter("mint")) if service == "mint" else sys.executable
    slots: list[RunSlot] = []
    for fork_server in fork_servers:
        folder = tmp_path_factory.mktemp("server")
        service_process = ServiceProcess(PROTOCOLS[service], model, folder, fork_server)
        service_process.start()
        trainer_fork_server = ForkServer("tests.torture.service_trainer", *MODULES[service], python=python)
        slots.append(RunSlot(service, service_process, trainer_fork_server, model))
    yield slots
    for slot in slots:
        slot.trainer_fork_server.close()
        slot.service_process.fork_server.kill()


def make_step_plans(*, kills_server: bool) -> list[list[PlannedKill]]:
    """Return plans that together cover every kill point of a step."""
    return [
        [
            PlannedKill(name, step, kills_other=kills_server)
            for step, name in enumerate(STEP_POINT_NAMES[first::3], start=1)
        ]
        for first in range(3)
    ]


def make_recovery_plan(*, kills_server: bool) -> list[PlannedKill]:
    """Return a plan for the recovery points. A plan that kills the trainer also contains kills that leave
    something to recover."""
    if kills_server:
        return [PlannedKill(name, RECOVERY_STEP, kills_other=True) for name in ("started", "released")]
    return [
        PlannedKill("started", RECOVERY_STEP),
        PlannedKill("optim_step", 2),
        PlannedKill("state loaded", RECOVERY_STEP),
        PlannedKill("released", RECOVERY_STEP),
        PlannedKill("artifact written", 4),
        PlannedKill("tombstoned", RECOVERY_STEP),
    ]


def run_kill_plan(
    run: ServiceRun, plan: list[PlannedKill], reference: Fingerprint, report: ReportProgress
) -> None:
    """Start the run with the plan, restart the killed process after each kill, and check the result."""
    switch_folder = run.folder / "switch"
    write_plan(switch_folder, plan)
    service_process = run.service_process
    assert service_process is not None
    if plan[0].kills_other:
        write_other_pid(switch_folder, service_process.pid)
    run.start(switch_folder)
    for number, kill in enumerate(plan):
        run.wait_until(
            lambda: count_fired_kills(switch_folder) > number or run.fork_server.has_exited()  # noqa: B023
        )
        assert count_fired_kills(switch_folder) > number, run.collect_logs()
        target = "the server" if kill.kills_other else "the trainer"
        report(f"killed {target}: {kill.point}, step {kill.step}")
        if kill.kills_other:
            service_process.restart()
            write_other_pid(switch_folder, service_process.pid)
        else:
            assert run.fork_server.wait() == -9, run.collect_logs()
            run.start(switch_folder)
    run.finish()
    assert run.read_fingerprint() == reference, run.collect_logs()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["trainer", "server"])
def test_service_run_killed_in_every_state_of_a_step_matches_local_run(
    target: str,
    slots: list[RunSlot],
    reference: Fingerprint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kills_server = target == "server"
    plans = [*make_step_plans(kills_server=kills_server), make_recovery_plan(kills_server=kills_server)]
    planned = {kill.point for plan in plans for kill in plan}
    assert planned >= {*STEP_POINT_NAMES}
    assert (
        kills_server
        or planned == {*STEP_POINT_NAMES, *RECOVERY_POINT_NAMES} == make_kill_points(slots[0].service).keys()
    )

    def make_job(slot: RunSlot, slot_plans: list[list[PlannedKill]]) -> Callable[[ReportProgress], None]:
        def kill_all(report: ReportProgress) -> None:
            for plan in slot_plans:
                folder = tmp_path / f"{plans.index(plan)}"
                run_kill_plan(slot.create_run(folder), plan, reference, report)

        return kill_all

    jobs = [make_job(slot, plans[number::CONCURRENT_RUNS]) for number, slot in enumerate(slots)]
    run_concurrently(jobs, capsys)


def kill_at_random(
    run: ServiceRun, rng: random.Random, max_kills: int, max_interval_seconds: float, report: ReportProgress
) -> int:
    """Kill the trainer and the server at random moments until the run finishes. Return the number of kills.

    Kills are at most ``max_interval_seconds`` apart. After ``max_kills``, the run finishes undisturbed. A
    trainer that exits because the service was killed is restarted.
    """
    service_process = run.service_process
    assert service_process is not None
    kills = 0
    run.start()
    while True:
        time.sleep(rng.uniform(0.0, max_interval_seconds))
        if run.fork_server.has_exited():
            if not run.reap_trainer():
                return kills
            run.start()
            continue
        if kills == max_kills:
            continue
        (target,) = rng.choices(list(TARGET_WEIGHTS), list(TARGET_WEIGHTS.values()))
        if target == "trainer":
            run.fork_server.kill()
            run.start()
        else:
            service_process.fork_server.kill()
            time.sleep(rng.uniform(0.0, 0.2))
            service_process.start()
        kills += 1
        report(f"{run.folder.name}, kill {kills}: {target}, {run.describe_progress()}")


@pytest.mark.timeout(400)
def test_service_run_killed_at_random_moments_matches_local_run(
    slots: list[RunSlot],
    undisturbed_seconds: float,
    reference: Fingerprint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make_job(number: int, slot: RunSlot) -> Callable[[ReportProgress], None]:
        def kill_enough(report: ReportProgress) -> None:
            kills_left = (
                int(os.environ.get("INSTAR_KILLS", "1")) * KILL_COUNTS[slot.service] // CONCURRENT_RUNS
            )
            seed = number
            while kills_left > 0:
                run = slot.create_run(tmp_path / f"seed {seed}")
                kills_left -= kill_at_random(
                    run,
                    random.Random(seed),
                    kills_left,
                    MAX_KILL_INTERVAL_FRACTION * undisturbed_seconds,
                    report,
                )
                assert run.read_fingerprint() == reference, run.collect_logs()
                seed += CONCURRENT_RUNS

        return kill_enough

    run_concurrently([make_job(number, slot) for number, slot in enumerate(slots)], capsys)
