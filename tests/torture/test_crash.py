"""Tests that a run killed with SIGKILL at any moment has the same result as an undisturbed run.

The same samples are trained in the same steps, weights and optimizer state are bit-identical, nothing is
trained twice, and every reply that an agent received in full is in the store.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model
from tests.torture.kill_switch import (
    RECOVERY_POINTS,
    RECOVERY_STEP,
    STEP_POINTS,
    PlannedKill,
    count_fired_kills,
    write_interpreter,
)
from tests.torture.run_process import Fingerprint, RunProcess, make_config
from tests.torture.torture_run import KILL_WEIGHTS, Setup, TortureConfig, TortureRun

pytestmark = pytest.mark.alone  # the test itself runs several processes concurrently
STEPS = 6
KILL_COUNT = 20 * int(os.environ.get("INSTAR_KILLS", "1"))
"""The number of kills at random moments."""
CONCURRENT_RUNS = 2
"""More than one, because a run leaves a core idle while it starts."""

ReportProgress = Callable[[str], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    """The fingerprint of a run without kills."""
    folder = tmp_path_factory.mktemp("reference")
    run = RunProcess(folder, make_config(folder, model, steps=STEPS))
    run.start()
    run.finish()
    fingerprint = run.read_fingerprint()
    assert {step for step, *_ in fingerprint.trained} == set(range(1, STEPS + 1)), "some step trained nothing"
    return fingerprint


def run_concurrently(
    jobs: Sequence[Callable[[ReportProgress], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the jobs, a few at a time, and print their progress, because they take minutes."""
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    started_at = time.monotonic()
    with ThreadPoolExecutor(CONCURRENT_RUNS) as pool:
        futures = [pool.submit(job, messages.put) for job in jobs]
        while not (all(future.done() for future in futures) and messages.empty()):
            try:
                line = messages.get(timeout=0.2)
            except queue.Empty:
                continue
            with capsys.disabled():
                print(f"\n  {time.monotonic() - started_at:5.1f} s  {line}", end="", flush=True)
    for future in futures:
        future.result()


def make_kill_plans(*, kills_supervisor: bool) -> list[list[PlannedKill]]:
    """Return plans that together cover every kill point of a step, and one plan for the recovery points.

    The recovery plan also contains kills that leave something to recover.
    """
    names = list(STEP_POINTS)
    step_plans = [
        [PlannedKill(name, step, kills_supervisor) for step, name in enumerate(names[first::3], start=1)]
        for first in range(3)
    ]
    recovery_plan = [
        PlannedKill("optim_step", 2, kills_supervisor),
        PlannedKill("state loaded", RECOVERY_STEP, kills_supervisor),
        PlannedKill("released", RECOVERY_STEP, kills_supervisor),
        PlannedKill("artifact written", 4, kills_supervisor),
        PlannedKill("tombstoned", RECOVERY_STEP, kills_supervisor),
    ]
    planned = {kill.point for plan in [*step_plans, recovery_plan] for kill in plan}
    assert planned == STEP_POINTS.keys() | RECOVERY_POINTS.keys()
    return [*step_plans, recovery_plan]


def run_kill_plan(
    folder: Path, model: Path, plan: list[PlannedKill], reference: Fingerprint, report: ReportProgress
) -> None:
    """Start a run with the plan, resume it after each kill of the supervisor, and check its result."""
    folder.mkdir()
    switch_folder = folder / "switch"
    config = make_config(folder, model, steps=STEPS)
    config["backend"]["python"] = str(write_interpreter(switch_folder, plan))
    run = RunProcess(folder, config)
    run.start()
    for number, kill in enumerate(plan):
        if kill.kills_supervisor:
            assert run.wait() == -9, run.collect_logs()
            run.assert_no_orphans()
        else:
            assert run.wait_until(
                lambda: count_fired_kills(switch_folder) > number  # noqa: B023
            ), run.collect_logs()
        report(
            f"killed {'the run' if kill.kills_supervisor else 'the trainer'}: {kill.point}, step {kill.step}"
        )
        assert count_fired_kills(switch_folder) == number + 1, run.collect_logs()
        if kill.kills_supervisor:
            run.start(resume=True)
    run.finish()
    assert run.read_fingerprint() == reference, run.collect_logs()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills_supervisor", [False, True], ids=["restarted", "resumed"])
def test_run_killed_in_every_state_of_a_step_matches_undisturbed_run(
    kills_supervisor: bool,
    model: Path,
    reference: Fingerprint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def make_job(number: int, plan: list[PlannedKill]) -> Callable[[ReportProgress], None]:
        return lambda report: run_kill_plan(tmp_path / str(number), model, plan, reference, report)

    plans = make_kill_plans(kills_supervisor=kills_supervisor)
    run_concurrently([make_job(number, plan) for number, plan in enumerate(plans)], capsys)


def kill_at_random(
    folder: Path, model: Path, seed: int, reference: Fingerprint, report: ReportProgress
) -> int:
    """Kill a run at random moments until it finishes, check its result, and return the number of kills."""
    config = TortureConfig(STEPS, max_kills=100, fault_weights=KILL_WEIGHTS)
    with TortureRun(folder, model, Setup(), config, f"seed {seed}") as run:
        result = run.run(reference, report=lambda text: report(f"seed {seed}: {text}"))
        assert result.is_correct, result
    return result.kill_count


@pytest.mark.timeout(900)
def test_run_killed_at_random_moments_matches_undisturbed_run(
    model: Path, reference: Fingerprint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_job(slot: int) -> Callable[[ReportProgress], None]:
        def kill_enough(report: ReportProgress) -> None:
            kills, seed = 0, slot
            while kills < KILL_COUNT // CONCURRENT_RUNS:
                kills += kill_at_random(tmp_path / str(seed), model, seed, reference, report)
                seed += CONCURRENT_RUNS

        return kill_enough

    run_concurrently([make_job(slot) for slot in range(CONCURRENT_RUNS)], capsys)


@pytest.mark.timeout(200)
def test_run_killed_after_checkpoint_repeats_later_steps(model: Path, tmp_path: Path) -> None:
    switch_folder = tmp_path / "switch"
    config = make_config(tmp_path, model, steps=4, checkpoint_every=2, keep_checkpoints=1)
    config["backend"]["python"] = str(write_interpreter(switch_folder, [PlannedKill("pushed", 3)]))
    run = RunProcess(tmp_path, config)
    run.start()
    run.finish()
    assert count_fired_kills(switch_folder) == 1
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
