"""Trainer and service killed at any moment: no batch is trained twice, and none is lost. The run ends with
the same claims and the same weights, bit for bit, as one that nobody disturbs, and one without a service."""

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
from tests.integration.backends.environments import interpreter
from tests.tiny import make_tiny_model
from tests.torture.killer import RECOVERY, Moment, fired, make_plan, name_other
from tests.torture.nursery import Nursery
from tests.torture.service_points import IN_RECOVERY, IN_STEP, points
from tests.torture.service_run import STEPS, Served, ServiceRun
from tests.torture.test_crash import AT_ONCE, Say, side_by_side
from tests.torture.tortured import Fingerprint

MODULES = {
    "tinker": ("instar.backends.tinker", "tinker"),
    "mint": ("instar.backends.tinker", "tinker"),
    "weaver": ("instar.backends.weaver",),
}
"""What a trainer of the service imports. MinT's own part changes the environment, so that waits."""
KILLS = {"tinker": 20, "weaver": 20, "mint": 12}
"""At random moments. INSTAR_KILLS=4 makes it four times as many, with those of `test_crash.py` over 200."""
VICTIMS = {"trainer": 3, "server": 1}
LIVES = 0.6
"""Longest time between two kills, as a share of what a run takes."""


@dataclass(frozen=True)
class Lane:
    """What runs beside another: a server that stays up, and where trainers come from."""

    service: str
    served: Served
    trainers: Nursery
    model: Path

    def run(self, folder: Path) -> ServiceRun:
        folder.mkdir()
        return ServiceRun(folder, self.model, self.service, self.trainers, self.served)


@pytest.fixture(scope="module")
def undisturbed(lanes: list[Lane], reference: Fingerprint, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that a run takes at the service, when its server has computed before."""
    seconds = 0.0
    for number in range(2):
        run = lanes[0].run(tmp_path_factory.mktemp("undisturbed") / str(number))
        began = time.monotonic()
        run.start()
        run.finish()
        seconds = time.monotonic() - began
        assert run.fingerprint() == reference, run.explain()
    return seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=256)


@pytest.fixture(scope="module")
def servers() -> Generator[list[Nursery]]:
    nurseries = [
        Nursery("tests.torture.service_server", "tests.torture.service_trainer", "peft")
        for _ in range(AT_ONCE)
    ]
    yield nurseries
    for nursery in nurseries:
        nursery.close()


@pytest.fixture(scope="module")
def reference(model: Path, servers: list[Nursery], tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    """The run that nobody disturbs, without a service."""
    run = ServiceRun(tmp_path_factory.mktemp("reference"), model, "local", servers[0], None)
    run.start()
    run.finish()
    found = run.fingerprint()
    assert {step for step, *_ in found.trained} == set(range(1, STEPS + 1)), "every step trains something"
    return found


@pytest.fixture(scope="module", params=list(PROTOCOLS))
def lanes(
    request: pytest.FixtureRequest,
    model: Path,
    servers: list[Nursery],
    reference: Fingerprint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[list[Lane]]:
    service: str = request.param
    python = str(interpreter("mint")) if service == "mint" else sys.executable
    made: list[Lane] = []
    for server in servers:
        served = Served(PROTOCOLS[service], model, tmp_path_factory.mktemp("server"), server)
        served.start()
        trainers = Nursery("tests.torture.service_trainer", *MODULES[service], python=python)
        made.append(Lane(service, served, trainers, model))
    yield made
    for lane in made:
        lane.trainers.close()
        lane.served.nursery.kill()


def spread(*, other: bool) -> list[list[Moment]]:
    """Every point of a step, over the steps of a few runs."""
    return [
        [Moment(name, step, other=other) for step, name in enumerate(IN_STEP[first::3], start=1)]
        for first in range(3)
    ]


def in_recovery(*, other: bool) -> list[Moment]:
    """The points of a recovery. Where the trainer dies, each after a kill that gives it something to do."""
    if other:
        return [Moment(name, RECOVERY, other=True) for name in ("started", "released")]
    return [
        Moment("started", RECOVERY),
        Moment("optim_step", 2),
        Moment("state loaded", RECOVERY),
        Moment("released", RECOVERY),
        Moment("artifact made", 4),
        Moment("tombstoned", RECOVERY),
    ]


def kill_by_plan(run: ServiceRun, plan: list[Moment], reference: Fingerprint, say: Say) -> None:
    switch = run.folder / "switch"
    make_plan(switch, plan)
    served = run.served
    assert served is not None
    if plan[0].other:
        name_other(switch, served.pid)
    run.start(switch)
    for number, moment in enumerate(plan):
        run.wait_until(lambda: fired(switch) > number or run.nursery.is_over())  # noqa: B023 - called here
        assert fired(switch) > number, run.explain()
        say(f"{'the server' if moment.other else 'the trainer'} died: {moment.point}, step {moment.step}")
        if moment.other:
            served.restart()
            name_other(switch, served.pid)
        else:
            assert run.nursery.wait() == -9, run.explain()
            run.start(switch)
    run.finish()
    assert run.fingerprint() == reference, run.explain()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["trainer", "server"])
def test_killed_in_every_state_of_a_step(
    victim: str,
    lanes: list[Lane],
    reference: Fingerprint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = victim == "server"
    plans = [*spread(other=other), in_recovery(other=other)]
    planned = {moment.point for plan in plans for moment in plan}
    assert planned >= {*IN_STEP}
    assert other or planned == {*IN_STEP, *IN_RECOVERY} == points(lanes[0].service).keys()

    def work(lane: Lane, mine: list[list[Moment]]) -> Callable[[Say], None]:
        def kill_all(say: Say) -> None:
            for plan in mine:
                folder = tmp_path / f"{plans.index(plan)}"
                kill_by_plan(lane.run(folder), plan, reference, say)

        return kill_all

    works = [work(lane, plans[number::AT_ONCE]) for number, lane in enumerate(lanes)]
    side_by_side(works, capsys)


def kill_at_random(run: ServiceRun, draw: random.Random, most: int, longest: float, say: Say) -> int:
    """Kill its trainer and its server, ``most`` times, or until it is over all the same; returns how often.
    ``longest`` is the most time between two kills."""
    served = run.served
    assert served is not None
    kills = 0
    run.start()
    while True:
        time.sleep(draw.uniform(0.0, longest))
        if run.nursery.is_over():
            if not run.gave_up():
                return kills
            run.start()
            continue
        if kills == most:
            continue
        (victim,) = draw.choices(list(VICTIMS), list(VICTIMS.values()))
        if victim == "trainer":
            run.nursery.kill()
            run.start()
        else:
            served.nursery.kill()
            time.sleep(draw.uniform(0.0, 0.2))
            served.start()
        kills += 1
        say(f"{run.folder.name}, kill {kills}: {victim}, {run.progress()}")


@pytest.mark.timeout(400)
def test_killed_at_random_moments(
    lanes: list[Lane],
    undisturbed: float,
    reference: Fingerprint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(number: int, lane: Lane) -> Callable[[Say], None]:
        def kill_enough(say: Say) -> None:
            left, seed = int(os.environ.get("INSTAR_KILLS", "1")) * KILLS[lane.service] // AT_ONCE, number
            while left > 0:
                run = lane.run(tmp_path / f"seed {seed}")
                left -= kill_at_random(run, random.Random(seed), left, LIVES * undisturbed, say)
                assert run.fingerprint() == reference, run.explain()
                seed += AT_ONCE

        return kill_enough

    side_by_side([work(number, lane) for number, lane in enumerate(lanes)], capsys)
