"""How fast the store records, lists and makes batches.

    python bench/store.py [--json] [--calls 1000000] [--rounds 20] [--dir FOLDER]

Recording: calls per second that are on disk, from 32 agents at once, of 4 KB and of 400 KB each, against bare
inserts of the same rows into the same tables with the same pragmas and rows per transaction, a slice of each
in turn, in a process set up as a gateway's is. ``ratio_raw`` is the lower of the two ratios.
``ratio_heap`` is the same against tables that have neither an index nor a constraint: rows that nobody could
find again.

Reading, in a store of a million calls: ``page_ms``, the slowest page of `sessions ls` with any of several
filters, and ``batch_s``, from a trainer's start to its first batch of 512 samples. Each is a median.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
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


async def record(folder: Path, rounds: int) -> list[recording.Rates]:
    rates: list[recording.Rates] = []
    for load in recording.LOADS:
        for bare in recording.BARE:
            log(f"recording calls of {load.name}, and bare inserts into {bare.name}")
            rates.append(await recording.measure(load, bare, folder, rounds))
    return rates


async def read(folder: Path, calls: int) -> dict[str, Any]:
    path = folder / "million.db"
    log(f"making a store of {calls} calls")
    shape = await million.make(path, calls)
    log(f"{path.stat().st_size / 1e9:.2f} GB; listing and filtering")
    store = SqliteStore(path)
    try:
        pages = await reading.pages(store, shape)
        log("making batches")
        return {"pages": pages, "batch_s": await reading.batch(store), "gigabytes": path.stat().st_size / 1e9}
    finally:
        await store.close()


def show(rates: list[recording.Rates], found: dict[str, Any]) -> None:
    out = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        "calls of", "against inserts into", "store calls/s", "inserts/s", "ratio", "rows per commit"
    )
    for rate in rates:
        speeds = (f"{rate.store:.0f}", f"{rate.raw:.0f}", f"{rate.ratio:.0%}", f"{rate.rows_per_commit:.0f}")
        table.add_row(rate.load, rate.bare, *speeds)
    out.print(table)
    table = Table("page of 50 sessions", "ms")
    for name, milliseconds in found["pages"].items():
        table.add_row(name, f"{milliseconds:.1f}")
    out.print(table)
    out.print(f"batch of 512 samples: {found['batch_s']:.2f} s", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    parser.add_argument(
        "--calls", type=int, default=1_000_000, help="in the store that is read (10000 at least)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="slices of each while recording")
    parser.add_argument("--dir", type=Path, default=Path(".cache"), help="on the disk to be measured")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        tune_gc()
        rates = uvloop.run(record(Path(folder), options.rounds))
        found = uvloop.run(read(Path(folder), options.calls))
    show(rates, found)
    if options.json:
        ratios = {bare.key: min(r.ratio for r in rates if r.bare == bare.name) for bare in recording.BARE}
        figures = {**ratios, "page_ms": max(found["pages"].values()), "batch_s": found["batch_s"]}
        print(json.dumps({**figures, "recording": [asdict(rate) for rate in rates], "reading": found}))


if __name__ == "__main__":
    main()
