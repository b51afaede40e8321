"""A process that writes to a store and prints what was acknowledged: ``python -m ... MODE PATH NAME``.

``write`` goes on until it is killed. ``count`` adds 200 calls. ``fill`` goes on until there is no room,
then lifts the file-size limit it set itself, if any, and writes once more. ``read`` counts the calls.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path

import numpy as np

from instar.errors import StoreFull
from instar.store.sqlite import SqliteStore

from .make import make_call, make_session


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def add(store: SqliteStore, name: str, size: int = 50) -> None:
    await store.add_calls([make_call(name, prompt_ids=np.arange(size, dtype=np.int32))])
    say(name)


async def write(store: SqliteStore, name: str, count: int) -> None:
    async def client(number: int) -> None:
        for turn in range(count):
            await add(store, f"{name}-{number}-{turn}")

    await asyncio.gather(*(client(number) for number in range(8)))


async def fill(store: SqliteStore, name: str) -> None:
    """Writes of several sizes at once, so that a group holds ones that fit and ones that do not."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if "limit" in name:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    full = 0
    for turn in range(400):
        sizes = (50, 5000, 40_000)
        writes = (add(store, f"{name}-{turn}-{size}", size) for size in sizes)
        results = await asyncio.gather(*writes, return_exceptions=True)
        for result in results:
            if isinstance(result, StoreFull):
                full += 1
            elif result is not None:
                raise result
        if full > 20:
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    say(f"full {full}")
    if "limit" in name:
        await add(store, f"{name}-afterwards")


async def main(mode: str, path: Path, name: str) -> None:
    if mode == "read":
        reader = SqliteStore(path, read_only=True)
        say(str(len(await reader.calls("s"))))
        return await reader.close()
    store = SqliteStore(path)
    if await store.session("s") is None:
        await store.open_session(make_session())
    if mode == "fill":
        await fill(store, name)
    else:
        await write(store, name, 25 if mode == "count" else 1_000_000)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
