"""A process that writes to a store and prints acknowledged writes: ``python -m ... MODE LOCATION NAME``.

LOCATION is a file path or ``postgresql://…#schema``. NAME is the prefix of the call ids; for ``claim``, it is
a number that makes the steps of this process unique.

``write`` adds calls until it is killed, and ``count`` adds 200. ``claim`` tries to claim 40 samples, each in
its own step. ``fill`` adds calls until the disk is full. If NAME contains "limit", ``fill`` limits the file
size first, and finally removes the limit and adds one more call. ``read`` prints the number of calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from pathlib import Path

import numpy as np

from instar.errors import ConflictError, StoreFull
from instar.store.base import Store
from instar.store.postgres import PostgresStore
from instar.store.postgres_server import PostgresServer
from instar.store.sqlite import SqliteStore

from .factories import RUN_ID, make_call, make_claim, make_session


def print_line(line: str) -> None:
    """Print without buffering, so that no line is lost if the process is killed."""
    os.write(1, f"{line}\n".encode())


async def add_call(store: Store, name: str, size: int = 50) -> None:
    await store.add_calls([make_call(name, prompt_ids=np.arange(size, dtype=np.int32))])
    print_line(name)


async def write(store: Store, name: str, count: int) -> None:
    async def add_turns(client: int) -> None:
        for turn in range(count):
            await add_call(store, f"{name}-{client}-{turn}")

    await asyncio.gather(*(add_turns(client) for client in range(8)))


async def claim(store: Store, name: str) -> None:
    for number in range(40):
        try:
            await store.claim_step(RUN_ID, int(name) * 100 + number, [make_claim(f"k{number}")])
            print_line(f"k{number}")
        except ConflictError:
            continue


async def fill(store: Store, name: str) -> None:
    """Write several sizes at once, so that a commit has writes that fit and writes that do not."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if "limit" in name:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    full_errors = 0
    for turn in range(400):
        sizes = (50, 5000, 40_000)
        writes = (add_call(store, f"{name}-{turn}-{size}", size) for size in sizes)
        results = await asyncio.gather(*writes, return_exceptions=True)
        for result in results:
            if isinstance(result, StoreFull):
                full_errors += 1
            elif result is not None:
                raise result
        if full_errors > 20:
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print_line(f"full {full_errors}")
    if "limit" in name:
        await add_call(store, f"{name}-afterwards")


def open_store(location: str, *, read_only: bool = False) -> Store:
    if location.startswith("postgresql:"):
        url, _, schema = location.rpartition("#")
        return PostgresStore(PostgresServer(url, schema, timeout=30.0), read_only=read_only)
    return SqliteStore(Path(location), read_only=read_only)


async def main(mode: str, location: str, name: str) -> None:
    if mode == "read":
        reader = open_store(location, read_only=True)
        print_line(str(len(await reader.calls("s"))))
        return await reader.close()
    store = open_store(location)
    with contextlib.suppress(ConflictError):
        await store.open_session(make_session())
    if mode == "fill":
        await fill(store, name)
    elif mode == "claim":
        await claim(store, name)
    else:
        await write(store, name, 25 if mode == "count" else 1_000_000)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
