"""Measure how fast the store records calls, lists sessions and builds batches.

    python bench/store.py [--json] [--calls 1000000] [--rounds 20] [--dir FOLDER]

Recording: calls per second committed by 32 concurrent agents, with calls of 4 KB and of 400 KB, compared
with bare inserts of the same rows into the same tables, with the same pragmas and calls per transaction. The
two alternate in rounds, in a process with a gateway's garbage collector settings. ``ratio_raw`` is the lower
of the ratios for the two sizes. ``ratio_heap`` is the same comparison with tables that have neither indexes
nor constraints and therefore allow no lookups. ``counter_overhead`` is the fraction of CPU time that the
counter of acknowledged calls adds.

Reading, in a store with a million calls: ``page_ms`` is the time to read a page of `sessions ls` with the
slowest of several filters, and ``batch_s`` the time a new trainer needs to build its first batch of 512
samples. Both are medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table
from store_parts import million, reading, recording

from instar.cluster.roles.gateway import tune_gc
from instar.store.sqlite import SqliteStore

console = Console(stderr=True)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


async def measure_recording(folder: Path, rounds: int) -> list[recording.Rates]:
    rates: list[recording.Rates] = []
    for load in recording.LOADS:
        for insert_target in recording.INSERT_TARGETS:
            log(f"recording {load.name} calls, compared with bare inserts into {insert_target.name}")
            rates.append(await recording.measure(load, insert_target, folder, rounds))
    return rates


async def measure_counter(folder: Path, rounds: int) -> float:
    log("recording with and without the counter of acknowledged calls")
    return await recording.measure_counter_overhead(folder, rounds)


async def measure_reading(folder: Path, calls: int) -> dict[str, Any]:
    path = folder / "million.db"
    log(f"creating a store with {calls} calls")
    shape = await million.make_store(path, calls)
    log(f"{path.stat().st_size / 1e9:.2f} GB; listing and filtering")
    store = SqliteStore(path)
    try:
        pages = await reading.measure_page_times(store, shape)
        log("building batches")
        return {
            "pages": pages,
            "batch_s": await reading.measure_batch_time(store),
            "gigabytes": path.stat().st_size / 1e9,
        }
    finally:
        await store.close()


def show(rates: list[recording.Rates], reading_metrics: dict[str, Any]) -> None:
    output = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("call size", "bare inserts into", "store calls/s", "inserts/s", "ratio", "calls per commit")
    for rate in rates:
        table.add_row(
            rate.load_name,
            rate.target_name,
            f"{rate.store_rate:.0f}",
            f"{rate.bare_rate:.0f}",
            f"{rate.ratio:.0%}",
            f"{rate.calls_per_commit:.0f}",
        )
    output.print(table)
    table = Table("page of 50 sessions", "ms")
    for name, milliseconds in reading_metrics["pages"].items():
        table.add_row(name, f"{milliseconds:.1f}")
    output.print(table)
    output.print(f"first batch of a new trainer: {reading_metrics['batch_s']:.2f} s", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON line at the end")
    parser.add_argument(
        "--calls", type=int, default=1_000_000, help="number of calls in the store to read (at least 10000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of rounds in each recording measurement"
    )
    parser.add_argument("--dir", type=Path, default=Path(".cache"), help="folder on the disk to measure")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        tune_gc()
        rates = uvloop.run(measure_recording(Path(folder), options.rounds))
        counter_overhead = uvloop.run(measure_counter(Path(folder), options.rounds))
        reading_metrics = uvloop.run(measure_reading(Path(folder), options.calls))
    show(rates, reading_metrics)
    console.print(f"counter of acknowledged calls: {counter_overhead:+.1%} CPU time", highlight=False)
    if options.json:
        ratios = {
            target.ratio_metric: min(rate.ratio for rate in rates if rate.target_name == target.name)
            for target in recording.INSERT_TARGETS
        }
        metrics = {
            **ratios,
            "counter_overhead": counter_overhead,
            "page_ms": max(reading_metrics["pages"].values()),
            "batch_s": reading_metrics["batch_s"],
        }
        recording_metrics = [rate.to_json() for rate in rates]
        print(json.dumps({**metrics, "recording": recording_metrics, "reading": reading_metrics}))


if __name__ == "__main__":
    main()
