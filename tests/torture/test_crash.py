"""After kill -9 at any moment a run ends as if nothing had happened: the same samples trained in the same
steps, the same weights and optimizer bit for bit, nothing trained twice, and every reply that an agent saw
end in the store."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model
from tests.torture.killer import IN_RECOVERY, POINTS, RECOVERY, Moment, fired, make_interpreter
from tests.torture.tortured import Fingerprint, Tortured, settings

STEPS = 6
RANDOM_KILLS = 50
RANDOM_RUNS = 5
MOST_RESTARTS = 4
"""Kills of one role under one supervisor, which gives up on a role that keeps dying."""

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


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Progress, past pytest's capturing: this takes minutes."""
    began = time.monotonic()

    def print_line(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {time.monotonic() - began:5.1f} s  {text}", end="", flush=True)

    return print_line


def plan(*, whole: bool) -> list[list[Moment]]:
    """Every point, spread over the steps of two runs; then the recovery's own, each after a kill that gives
    it something to do."""
    names = list(POINTS)
    runs = [
        [Moment(name, step, whole) for step, name in enumerate(half, start=1)]
        for half in (names[0::2], names[1::2])
    ]
    in_recovery = [
        Moment(before, step, whole) if name is None else Moment(name, RECOVERY, whole)
        for before, name, step in (
            ("optim_step", None, 2),
            ("", "state loaded", 0),
            ("", "released", 0),
            ("artifact written", None, 4),
            ("", "tombstoned", 0),
        )
    ]
    assert {moment.point for moment in in_recovery} >= set(IN_RECOVERY)
    return [*runs, in_recovery]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(3), ids=["even", "odd", "recovery"])
@pytest.mark.parametrize("whole", [False, True], ids=["restarted", "resumed"])
def test_killed_in_every_state_of_a_step(
    whole: bool, part: int, model: Path, reference: Fingerprint, tmp_path: Path, say: Say
) -> None:
    moments = plan(whole=whole)[part]
    switch = tmp_path / "switch"
    config = settings(tmp_path, model, steps=STEPS)
    config["backend"]["python"] = str(make_interpreter(switch, moments))
    run = Tortured(tmp_path, config)
    run.start()
    if whole:
        for number, moment in enumerate(moments):
            assert run.wait() == -9, run.explain()
            assert fired(switch) == number + 1
            say(f"resuming: all died after {moment.point!r} of step {moment.step}")
            run.assert_no_orphans()
            run.start(resume=True)
    run.finish()
    say(f"{fired(switch)} kills: {', '.join(moment.point for moment in moments)}")
    assert fired(switch) == len(moments), run.explain()
    assert run.fingerprint() == reference, run.explain()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_killed_at_random_moments(
    seed: int, model: Path, reference: Fingerprint, tmp_path: Path, say: Say
) -> None:
    draw = random.Random(seed)
    run = Tortured(tmp_path, settings(tmp_path, model, steps=STEPS))
    run.start()
    restarts = dict.fromkeys(("trainer", "gateway", "rollout"), 0)
    kills = 0
    while kills < RANDOM_KILLS // RANDOM_RUNS:
        time.sleep(draw.uniform(0.2, 4.0))
        assert run.process is not None
        if run.process.poll() is not None:
            break
        victim = draw.choice(["trainer", "gateway", "rollout", "whole run"])
        if victim == "whole run":
            run.kill()
            run.assert_no_orphans()
            restarts = dict.fromkeys(restarts, 0)
            run.start(resume=(run.run_dir / "config.json").exists())
        elif restarts[victim] == MOST_RESTARTS or not run.kill_role(victim):
            continue
        else:
            restarts[victim] += 1
        kills += 1
        say(f"kill {kills} of run {seed}: {victim}, {run.progress()}")
    run.finish()
    assert kills == RANDOM_KILLS // RANDOM_RUNS, f"the run was over after {kills} kills"
    assert run.fingerprint() == reference, run.explain()


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
