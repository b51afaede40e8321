"""After kill -9 at any moment a run ends as if nothing had happened: the same samples trained in the same
steps, the same weights and optimizer bit for bit, nothing trained twice, and every reply that an agent saw
end in the store."""

from __future__ import annotations

import os
import queue
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model
from tests.torture.killer import IN_RECOVERY, POINTS, RECOVERY, Moment, fired, make_interpreter
from tests.torture.tortured import Fingerprint, Tortured, settings

pytestmark = pytest.mark.alone  # it runs several things side by side itself
STEPS = 6
KILLS = 20 * int(os.environ.get("INSTAR_KILLS", "1"))
"""At random moments."""
MOST_RESTARTS = 4
"""Kills of one role under one supervisor, which gives up on a role that keeps dying."""
AT_ONCE = 2
"""Runs at the same time: a run that starts up leaves a core idle."""
VICTIMS = {"trainer": 4, "gateway": 3, "rollout": 3, "whole run": 2}

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    run = Tortured(folder, settings(folder, model, steps=STEPS))
    run.start()
    run.finish()
    found = run.fingerprint()
    assert {step for step, *_ in found.trained} == set(range(1, STEPS + 1)), "every step trains something"
    return found


def side_by_side(works: Sequence[Callable[[Say], None]], capsys: pytest.CaptureFixture[str]) -> None:
    """Run them, some at once, and print what they say as they say it: this takes minutes."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(work, said.put) for work in works]
        while not (all(work.done() for work in running) and said.empty()):
            try:
                line = said.get(timeout=0.2)
            except queue.Empty:
                continue
            with capsys.disabled():
                print(f"\n  {time.monotonic() - began:5.1f} s  {line}", end="", flush=True)
    for work in running:
        work.result()


def plans(*, whole: bool) -> list[list[Moment]]:
    """Every point, spread over the steps of a few runs; then the recovery's own, each after a kill that
    gives it something to do."""
    names = list(POINTS)
    spread = [
        [Moment(name, step, whole) for step, name in enumerate(names[first::3], start=1)]
        for first in range(3)
    ]
    in_recovery = [
        Moment("optim_step", 2, whole),
        Moment("state loaded", RECOVERY, whole),
        Moment("released", RECOVERY, whole),
        Moment("artifact written", 4, whole),
        Moment("tombstoned", RECOVERY, whole),
    ]
    planned = {moment.point for plan in [*spread, in_recovery] for moment in plan}
    assert planned == POINTS.keys() | IN_RECOVERY.keys()
    return [*spread, in_recovery]


def kill_by_plan(folder: Path, model: Path, plan: list[Moment], reference: Fingerprint, say: Say) -> None:
    folder.mkdir()
    switch = folder / "switch"
    config = settings(folder, model, steps=STEPS)
    config["backend"]["python"] = str(make_interpreter(switch, plan))
    run = Tortured(folder, config)
    run.start()
    for number, moment in enumerate(plan):
        if moment.whole:
            assert run.wait() == -9, run.explain()
            run.assert_no_orphans()
        else:
            assert run.wait_until(lambda: fired(switch) > number), run.explain()  # noqa: B023 — called here
        say(f"{'the run' if moment.whole else 'the trainer'} died: {moment.point}, step {moment.step}")
        assert fired(switch) == number + 1, run.explain()
        if moment.whole:
            run.start(resume=True)
    run.finish()
    assert run.fingerprint() == reference, run.explain()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole", [False, True], ids=["restarted", "resumed"])
def test_killed_in_every_state_of_a_step(
    whole: bool, model: Path, reference: Fingerprint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(number: int, plan: list[Moment]) -> Callable[[Say], None]:
        return lambda say: kill_by_plan(tmp_path / str(number), model, plan, reference, say)

    side_by_side([work(number, plan) for number, plan in enumerate(plans(whole=whole))], capsys)


def kill_at_random(folder: Path, model: Path, seed: int, reference: Fingerprint, say: Say) -> int:
    """Kill a run until it is over all the same; returns how often."""
    folder.mkdir()
    draw = random.Random(seed)
    run = Tortured(folder, settings(folder, model, steps=STEPS))
    run.start()
    restarts = dict.fromkeys(VICTIMS, 0)
    kills = 0
    while draw.random() < 0.2 or run.wait_until(run.is_up):
        time.sleep(draw.uniform(0.0, 1.2))
        (victim,) = draw.choices(list(VICTIMS), list(VICTIMS.values()))
        if restarts[victim] == MOST_RESTARTS or run.is_over():
            continue
        if victim == "whole run":
            run.kill()
            run.assert_no_orphans()
            restarts = dict.fromkeys(VICTIMS, 0)
            run.start(resume=(run.run_dir / "config.json").exists())
        elif not run.kill_role(victim):
            continue
        restarts[victim] += 1
        kills += 1
        say(f"seed {seed}, kill {kills}: {victim}, {run.progress()}")
    run.finish()
    assert run.fingerprint() == reference, run.explain()
    return kills


@pytest.mark.timeout(900)
def test_killed_at_random_moments(
    model: Path, reference: Fingerprint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(lane: int) -> Callable[[Say], None]:
        def kill_enough(say: Say) -> None:
            kills, seed = 0, lane
            while kills < KILLS // AT_ONCE:
                kills += kill_at_random(tmp_path / str(seed), model, seed, reference, say)
                seed += AT_ONCE

        return kill_enough

    side_by_side([work(lane) for lane in range(AT_ONCE)], capsys)


@pytest.mark.timeout(200)
def test_steps_after_the_last_checkpoint_are_trained_again(model: Path, tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    config = settings(tmp_path, model, steps=4, checkpoint_every=2, keep_checkpoints=1)
    config["backend"]["python"] = str(make_interpreter(switch, [Moment("pushed", 3)]))
    run = Tortured(tmp_path, config)
    run.start()
    run.finish()
    assert fired(switch) == 1
    run.assert_consistent()
    versions = run.query("SELECT version, step, state FROM policies ORDER BY version")
    assert versions == [
        (1, 1, "published"),
        (2, 2, "published"),
        (3, 3, "tombstoned"),
        (4, 3, "published"),
        (5, 4, "published"),
    ]
    claims = run.query("SELECT step, COUNT(*) FROM claims WHERE step IS NOT NULL GROUP BY step")
    assert claims == [(1, 8), (2, 8), (3, 8), (4, 8)]
