"""Search for crashes and interleavings that lose a reply or train a sample twice.

    python bench/torture.py [--json] [--full] [--only kills|simulation] [--minutes 8] [--state FOLDER]
    python bench/torture.py --repeat "random 17"

Kills: real runs on SQLite and PostgreSQL, local and on Ray, are hit by SIGKILLs to random roles (many of
them in the middle of a training step), SIGSTOPs, full disks and clock jumps (see tests/torture).
``kills_in_step`` counts the kills that ended a trainer while a step was in progress, ``lost`` the replies
that an agent received but that are not in the store, ``twice`` the samples that were trained twice, and
``wrong_runs`` the runs whose result differs from an undisturbed run (in sync mode, this includes the
adapter's hash). ``--bug`` plants a bug in the processes, to check that these metrics detect it.

Simulation: the real trainer, rollout, scoring and session services run as simulated processes over one
database, with virtual time and a scheduler that decides which process continues (see bench/torture_parts). A
process is killed at every gate (each query, reply or file that it waits for) of the undisturbed schedules.
In random schedules, up to four faults kill processes or replace them while they are still running.
``interleavings`` is the number of schedules, ``violations`` the number of broken invariants, and
``bugs_found`` the number of planted bugs that the simulation finds.

By default, each part stops after ``--minutes`` and prints the fraction of a full run that it covered.
``--full`` runs both parts to completion and continues an interrupted campaign from ``--state``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torture_parts.bugs import BUGS
from torture_parts.campaign import (
    MAX_REPORTED,
    RANDOM_SCHEDULES,
    Campaign,
    repeat_schedule,
    run_campaign,
)
from torture_parts.kills import (
    CONCURRENT_RUNS,
    KILL_FRACTIONS,
    KILLS_PER_RUN,
    REQUIRED_KILLS,
    STEPS,
    KillCampaign,
    KillRunner,
    list_available_setups,
)
from torture_parts.state import StateFile

from tests.torture.planted_bugs import BUGS as PROCESS_BUGS
from tests.torture.torture_run import TortureConfig

console = Console(stderr=True)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def run_simulation(options: argparse.Namespace) -> dict[str, Any]:
    """Run the simulation, print its results and return its metrics."""
    logged_at = time.monotonic()

    def log_progress(campaign: Campaign, seconds: float) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at > 10:
            logged_at = time.monotonic()
            log(
                f"{campaign.interleavings} of {campaign.total_schedules} schedules, "
                f"{len(campaign.violations)} violations, "
                f"{len(campaign.bugs)} of {len(BUGS)} planted bugs tried, {seconds:.0f} s"
            )

    campaign = run_campaign(
        random_schedules=options.schedules,
        timeout_seconds=None if options.full else 60 * options.minutes,
        processes=options.processes,
        state=StateFile(options.state / "simulation.jsonl" if options.full else None),
        on_progress=log_progress,
    )
    show_simulation(campaign)
    return {
        "interleavings": campaign.interleavings,
        "violations": len(campaign.violations),
        "simulation_share": campaign.coverage,
        "crash_points": campaign.count_schedules("crash"),
        "all_crash_points": campaign.crash_points,
        "random_schedules": campaign.count_schedules("random"),
        "crashes": sum(result.crashes for result in campaign.results),
        "decisions": sum(result.decisions for result in campaign.results),
        "bugs_planted": len(BUGS),
        "bugs_found": sum(schedules is not None for schedules in campaign.bugs.values()),
        "bugs": campaign.bugs,
        "first_violations": campaign.violations[:MAX_REPORTED],
    }


def show_simulation(campaign: Campaign) -> None:
    output = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("planted bug", "schedules until found")
    for name, schedules in campaign.bugs.items():
        table.add_row(name, "not found" if schedules is None else str(schedules))
    output.print(table)
    for violation in campaign.violations[:MAX_REPORTED]:
        output.print(violation, highlight=False)
    output.print(
        f"{campaign.count_schedules('crash')} of {campaign.crash_points} crash points and "
        f"{campaign.count_schedules('random')} random schedules, {len(campaign.violations)} violations, "
        f"{campaign.coverage:.0%} of a full run",
        highlight=False,
    )


def repeat_and_show(name: str) -> None:
    outcome = repeat_schedule(name)
    for line in (*outcome.crashes, *(f"violation: {violation}" for violation in outcome.violations)):
        console.print(line, highlight=False)
    log(f"{outcome.decisions} decisions, {len(outcome.violations)} violations, trace {outcome.trace}")


def run_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Run the kill campaign, print its results and return its metrics."""
    os.environ.pop("RAY_ADDRESS", None)  # runs must not share a Ray cluster, because it is killed with them
    started_at = time.monotonic()
    setups = list_available_setups(options.setup, log)
    campaign = KillCampaign({setup: options.kills * KILL_FRACTIONS[setup] for setup in setups})
    runner = KillRunner(TortureConfig(STEPS, KILLS_PER_RUN, bug=options.bug), options.state / "wrong", log)
    state = StateFile(options.state / "kills.jsonl" if options.full else None)
    previous_kills = sum(sum(row["result"]["kills"].values()) for row in state.rows)
    timeout_seconds = None if options.full else 60 * options.minutes
    runner.run(campaign, state, timeout_seconds=timeout_seconds, concurrent_runs=options.runs)
    show_kills(campaign)
    minutes = (time.monotonic() - started_at) / 60
    results, faults = campaign.results, campaign.count_other_faults()
    return {
        "kills": campaign.kills,
        "kills_in_step": campaign.kills_in_step,
        "lost": sum(len(result.lost) for result in results),
        "twice": sum(len(result.trained_twice) for result in results),
        "wrong_runs": sum(not result.is_correct for result in results),
        "runs": len(results),
        "acknowledged": sum(result.acknowledged for result in results),
        "stops": faults["suspend"],
        "full_disks": faults["full disk"],
        "clock_jumps": faults["clock jump"],
        "kills_by_victim": dict(campaign.count_kills_by_target()),
        "kills_by_setup": {setup.name: campaign.count_kills(setup.name) for setup in setups},
        "kills_per_minute": (campaign.kills - previous_kills) / minutes,
        "kills_share": campaign.coverage,
        "problems": [result.problem for result in results if result.problem][:MAX_REPORTED],
    }


def show_kills(campaign: KillCampaign) -> None:
    output = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        "setup", "runs", "kills", "received replies", "lost replies", "samples trained twice", "wrong runs"
    )
    for setup in campaign.quotas:
        results = [run.result for run in campaign.runs if run.setup == setup.name]
        table.add_row(
            setup.name,
            str(len(results)),
            str(campaign.count_kills(setup.name)),
            str(sum(result.acknowledged for result in results)),
            str(sum(len(result.lost) for result in results)),
            str(sum(len(result.trained_twice) for result in results)),
            str(sum(not result.is_correct for result in results)),
        )
    output.print(table)
    for run in campaign.runs:
        if run.result.problem:
            output.print(
                f"{run.setup} {run.number}: {run.result.problem[:500]}", highlight=False, markup=False
            )
    targets = ", ".join(f"{name}: {count}" for name, count in campaign.count_kills_by_target().most_common())
    faults = ", ".join(f"{name}: {count}" for name, count in campaign.count_other_faults().most_common())
    output.print(
        f"{campaign.kills} kills ({targets}), {campaign.kills_in_step} of them in a step, "
        f"other faults: {faults or 'none'}, {campaign.coverage:.0%} of a full run",
        highlight=False,
    )


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "kills": run_kills,
    "simulation": run_simulation,
}
"""The function for each part of the benchmark (``--only``). It returns the metrics for the JSON output."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON line at the end")
    parser.add_argument(
        "--full", action="store_true", help="run without a time limit, and continue an interrupted campaign"
    )
    parser.add_argument("--only", choices=sorted(PARTS), help="run only this part")
    parser.add_argument("--minutes", type=float, default=8, help="time limit per part; ignored with --full")
    parser.add_argument(
        "--schedules",
        type=int,
        default=RANDOM_SCHEDULES,
        help="number of random schedules in a full run",
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="number of processes that run schedules"
    )
    parser.add_argument("--kills", type=int, default=REQUIRED_KILLS, help="number of kills in a full run")
    parser.add_argument("--runs", type=int, default=CONCURRENT_RUNS, help="number of concurrent runs")
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        choices=[setup.name for setup in KILL_FRACTIONS],
        help="setup of the runs to kill; may be repeated (default: all)",
    )
    parser.add_argument("--bug", choices=sorted(PROCESS_BUGS), help="plant a bug in the runs to kill")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".cache/torture"),
        help="folder for wrong runs and for the progress that --full continues from",
    )
    parser.add_argument("--repeat", metavar="NAME", help='repeat one schedule, such as "random 17"')
    options = parser.parse_args()
    if options.repeat:
        repeat_and_show(options.repeat)
        return
    metrics: dict[str, Any] = {}
    for name, run in PARTS.items():
        if options.only in (None, name):
            log(f"running the {name} part")
            metrics |= run(options)
    metrics["share"] = min(metrics[name] for name in ("kills_share", "simulation_share") if name in metrics)
    if options.json:
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
