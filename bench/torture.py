"""Search for crashes and interleavings that lose a reply or train a sample twice.

    python bench/torture.py [--json] [--full] [--only kills|simulation] [--minutes 8] [--state FOLDER]
    python bench/torture.py --repeat "random 17"

Kills: runs with real processes get SIGKILLs of random roles, many of them in the middle of a training step,
SIGSTOPs, full disks and jumps of the clock (tests/torture), on SQLite and PostgreSQL, local and on Ray.
``kills_in_step`` counts the kills that ended a trainer between the claim and the commit of a step, ``lost``
the replies that an agent received and that are not in the store, ``twice`` the samples that are in the final
weights twice, and ``wrong_runs`` all runs that ended otherwise than an undisturbed one; in sync mode with
another adapter hash. With ``--bug``, a bug is planted in the processes, so that these figures are not 0.

Simulation: it runs the real trainer, rollout, scoring and session services as processes over one database,
with virtual time and a scheduler that decides which of them continues (bench/torture_parts). It kills the
process at every gate of the undisturbed schedules (each query, reply and file that a process waits for), and
in random schedules up to four times, or replaces it while it still runs. ``interleavings`` is the number of
schedules, ``violations`` the number of broken invariants, and ``bugs_found`` the number of planted bugs that
the simulation finds.

By default, each part stops after ``--minutes`` and prints which share it covered. ``--full`` runs all of
them, and continues interrupted ones from ``--state``.
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
    KILLS,
    KILLS_PER_RUN,
    SHARES,
    STEPS,
    KillCampaign,
    KillRunner,
    list_possible_setups,
)
from torture_parts.state import StateFile

from tests.torture.planted_bugs import BUGS as PROCESS_BUGS
from tests.torture.tortured_run import Torture

console = Console(stderr=True)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def run_simulation(options: argparse.Namespace) -> dict[str, Any]:
    """Run the simulation, print its results and return its figures."""
    last_line = time.monotonic()

    def show_progress(campaign: Campaign, seconds: float) -> None:
        nonlocal last_line
        if time.monotonic() - last_line > 10:
            last_line = time.monotonic()
            log(
                f"{campaign.interleavings} of {campaign.total} schedules, {len(campaign.violations)} "
                f"violations, {len(campaign.bugs)} of {len(BUGS)} planted bugs, {seconds:.0f} s"
            )

    campaign = run_campaign(
        random_schedules=options.schedules,
        seconds=None if options.full else 60 * options.minutes,
        processes=options.processes,
        state=StateFile(options.state / "simulation.jsonl" if options.full else None),
        on_progress=show_progress,
    )
    show_simulation(campaign)
    return {
        "interleavings": campaign.interleavings,
        "violations": len(campaign.violations),
        "simulation_share": campaign.share,
        "crash_points": campaign.count("crash"),
        "all_crash_points": campaign.crash_points,
        "random_schedules": campaign.count("random"),
        "crashes": sum(result.crashes for result in campaign.results),
        "decisions": sum(result.decisions for result in campaign.results),
        "bugs_planted": len(BUGS),
        "bugs_found": sum(schedules is not None for schedules in campaign.bugs.values()),
        "bugs": campaign.bugs,
        "first_violations": campaign.violations[:MAX_REPORTED],
    }


def show_simulation(campaign: Campaign) -> None:
    out = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("planted bug", "found after schedules")
    for name, schedules in campaign.bugs.items():
        table.add_row(name, "not found" if schedules is None else str(schedules))
    out.print(table)
    for violation in campaign.violations[:MAX_REPORTED]:
        out.print(violation, highlight=False)
    out.print(
        f"{campaign.count('crash')} of {campaign.crash_points} crash points and {campaign.count('random')} "
        f"random schedules, {len(campaign.violations)} violations: {campaign.share:.0%} of the full figure",
        highlight=False,
    )


def show_repeated(name: str) -> None:
    outcome = repeat_schedule(name)
    for line in (*outcome.crashes, *(f"violation: {violation}" for violation in outcome.violations)):
        console.print(line, highlight=False)
    log(f"{outcome.decisions} decisions, {len(outcome.violations)} violations, trace {outcome.trace}")


def run_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Torture runs, print the results and return the figures."""
    os.environ.pop("RAY_ADDRESS", None)  # runs must not share a cluster, because it is killed with them
    started = time.monotonic()
    setups = list_possible_setups(options.setup, log)
    campaign = KillCampaign({setup: options.kills * SHARES[setup] for setup in setups})
    runner = KillRunner(Torture(STEPS, KILLS_PER_RUN, bug=options.bug), options.state / "wrong", log)
    state = StateFile(options.state / "kills.jsonl" if options.full else None)
    earlier = sum(sum(row["result"]["kills"].values()) for row in state.rows)
    seconds = None if options.full else 60 * options.minutes
    runner.run(campaign, state, seconds=seconds, concurrent_runs=options.runs)
    show_kills(campaign)
    minutes = (time.monotonic() - started) / 60
    results, faults = campaign.results, campaign.count_faults()
    return {
        "kills": campaign.kills,
        "kills_in_step": campaign.kills_in_step,
        "lost": sum(len(result.lost) for result in results),
        "twice": sum(len(result.twice) for result in results),
        "wrong_runs": sum(not result.is_correct for result in results),
        "runs": len(results),
        "acknowledged": sum(result.acknowledged for result in results),
        "stops": faults["stop"],
        "full_disks": faults["full disk"],
        "clock_jumps": faults["clock jump"],
        "kills_by_victim": dict(campaign.count_victims()),
        "kills_by_setup": {setup.name: campaign.count_kills(setup.name) for setup in setups},
        "kills_per_minute": (campaign.kills - earlier) / minutes,
        "kills_share": campaign.share,
        "problems": [result.problem for result in results if result.problem][:MAX_REPORTED],
    }


def show_kills(campaign: KillCampaign) -> None:
    out = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("setup", "runs", "kills", "acknowledged", "lost", "twice", "wrong runs")
    for setup in campaign.quotas:
        results = [run.result for run in campaign.runs if run.setup == setup.name]
        table.add_row(
            setup.name,
            str(len(results)),
            str(campaign.count_kills(setup.name)),
            str(sum(result.acknowledged for result in results)),
            str(sum(len(result.lost) for result in results)),
            str(sum(len(result.twice) for result in results)),
            str(sum(not result.is_correct for result in results)),
        )
    out.print(table)
    for run in campaign.runs:
        if run.result.problem:
            out.print(f"{run.setup} {run.number}: {run.result.problem[:500]}", highlight=False, markup=False)
    victims = ", ".join(f"{count} of the {name}" for name, count in campaign.count_victims().most_common())
    faults = ", ".join(f"{count} times {name}" for name, count in campaign.count_faults().most_common())
    out.print(
        f"{campaign.kills} kills ({victims}), {campaign.kills_in_step} of them in a step; {faults}: "
        f"{campaign.share:.0%} of the full figure",
        highlight=False,
    )


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "kills": run_kills,
    "simulation": run_simulation,
}
"""The parts of the command, by the value of ``--only``. Each returns its keys of the JSON line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line at the end")
    parser.add_argument("--full", action="store_true", help="run everything, however long it takes")
    parser.add_argument("--only", choices=sorted(PARTS), help="run one part only")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of each part without --full")
    parser.add_argument(
        "--schedules",
        type=int,
        default=RANDOM_SCHEDULES,
        help="random schedules of the full figure",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--kills", type=int, default=KILLS, help="kills of the full figure")
    parser.add_argument("--runs", type=int, default=CONCURRENT_RUNS, help="concurrent runs that are killed")
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        choices=[setup.name for setup in SHARES],
        help="a setup of the runs that are killed; may be repeated (default: all)",
    )
    parser.add_argument("--bug", choices=sorted(PROCESS_BUGS), help="plant a bug in the runs that are killed")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".cache/torture"),
        help="folder from which --full continues, and to which wrong runs are copied",
    )
    parser.add_argument("--repeat", metavar="NAME", help='run one schedule again, such as "random 17"')
    options = parser.parse_args()
    if options.repeat:
        show_repeated(options.repeat)
        return
    figures: dict[str, Any] = {}
    for name, run in PARTS.items():
        if options.only in (None, name):
            log(f"running the {name}")
            figures |= run(options)
    shares = [figures[name] for name in ("kills_share", "simulation_share") if name in figures]
    figures["share"] = min(shares)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
