"""Search for crashes and interleavings that lose a reply or train a sample twice.

    python bench/torture.py [--json] [--full] [--only simulation] [--minutes 15] [--state FILE]
    python bench/torture.py --repeat "random 17"

The simulation runs the real trainer, rollout, scoring and session services as processes over one database,
with virtual time and a scheduler that decides which of them continues (bench/torture_parts). It kills the
process at every gate of the undisturbed schedules (each query, reply and file that a process waits for), and
in random schedules up to four times, or replaces it while it still runs. ``interleavings`` is the number of
schedules, ``violations`` the number of broken invariants, and ``bugs_found`` the number of planted bugs that
the simulation finds.

By default, the command stops after ``--minutes`` and prints which share it covered. ``--full`` runs all of
it, and continues an interrupted run from ``--state``.
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
        state_file=options.state if options.full else None,
        on_progress=show_progress,
    )
    show_simulation(campaign)
    found = [name for name, schedules in campaign.bugs.items() if schedules is not None]
    return {
        "interleavings": campaign.interleavings,
        "violations": len(campaign.violations),
        "share": campaign.share,
        "crash_points": campaign.count("crash"),
        "all_crash_points": campaign.crash_points,
        "random_schedules": campaign.count("random"),
        "crashes": sum(result.crashes for result in campaign.results),
        "decisions": sum(result.decisions for result in campaign.results),
        "bugs_planted": len(BUGS),
        "bugs_found": len(found),
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


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"simulation": run_simulation}
"""The parts of the command, by the value of ``--only``. Each returns its keys of the JSON line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line at the end")
    parser.add_argument("--full", action="store_true", help="run everything, however long it takes")
    parser.add_argument("--only", choices=sorted(PARTS), help="run one part only")
    parser.add_argument("--minutes", type=float, default=15, help="time limit of each part without --full")
    parser.add_argument(
        "--schedules",
        type=int,
        default=RANDOM_SCHEDULES,
        help="random schedules of the full figure",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".cache/torture/simulation.jsonl"),
        help="file from which --full continues",
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
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
