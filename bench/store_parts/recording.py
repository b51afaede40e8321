"""Calls recorded per second, beside bare inserts of the same rows.

A round is a slice of each in turn, so that what else the machine does falls on both. The bare inserts take
rows that were encoded beforehand, and put them into the same tables with as many rows in a transaction as the
store had, under the same pragmas, from one thread that does nothing else.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from instar.store.call_rows import encode_call
from instar.store.migrations import create_or_migrate
from instar.store.rows import encode_session
from instar.store.schema import CALLS, SESSIONS, Table
from instar.store.sqlite import SqliteStore
from instar.store.sqlite_database import SqliteDatabase, connect
from instar.types import Call, Session
from store_parts.calls import a_session, turns

IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    size: int
    """Bytes that a call brings."""
    turns: int
    """Calls of a session."""
    calls: int
    """Of one slice."""


LOADS = (Load("4 KB", 4_000, 8, 1024), Load("400 KB", 400_000, 1, 128))


@dataclass(frozen=True, slots=True)
class Rates:
    """Calls per second over all slices, and the ratio of the two."""

    load: str
    bare: str
    bytes: int
    """Of a row, as stored."""
    store: float
    raw: float
    ratio: float
    rows_per_commit: float


Talks = list[tuple[Session, list[Call]]]


async def measure(load: Load, kind: Bare, folder: Path, rounds: int) -> Rates:
    path = folder / f"store-{kind.key}-{load.size}.db"
    raw_path = folder / f"raw-{kind.key}-{load.size}.db"
    bare = kind.make(raw_path)
    store = SqliteStore(path)
    stored = raw = 0.0
    """Seconds."""
    together: list[float] = []
    row_bytes = 0
    try:
        for number in range(rounds + 1):
            talks = make_talks(load)
            commits = store.commits
            seconds = await record(store, talks)
            grouped = load.calls / (store.commits - commits)
            rows = encoded(make_talks(load))
            row_bytes = bytes_of(rows[-1][1])
            bare_seconds = insert(bare, rows, max(1, round(grouped)))
            if number:  # the first warms up
                stored += seconds
                raw += bare_seconds
                together.append(grouped)
    finally:
        await store.close()
        bare.close()
        path.unlink()
        raw_path.unlink()
    calls = load.calls * rounds
    grouped = statistics.median(together)
    return Rates(load.name, kind.name, row_bytes, calls / stored, calls / raw, raw / stored, grouped)


def make_talks(load: Load) -> Talks:
    sessions = [a_session() for _ in range(load.calls // load.turns)]
    return [(session, list(turns(session, load.size, load.turns))) for session in sessions]


async def record(store: SqliteStore, talks: Talks) -> float:
    """Seconds with so many agents at once, each of which waits for its call to be on disk."""
    waiting = iter(talks)

    async def agent() -> None:
        for session, calls in waiting:
            await store.add_calls(calls[:1], opening=session)
            for call in calls[1:]:
                await store.add_calls([call])

    began = time.perf_counter()
    await asyncio.gather(*(agent() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began


# --- bare inserts -------------------------------------------------------------------------------

Values = list[object]


def bare_database(path: Path) -> SqliteDatabase:
    """The store's own tables, indexes and pragmas."""
    path.touch()
    database = connect(path)
    create_or_migrate(database, path)
    return database


def heap_database(path: Path) -> SqliteDatabase:
    """The same columns, without any index or constraint."""
    path.touch()
    database = connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    for table in (SESSIONS, CALLS):
        database.execute(
            f"CREATE TABLE {table.name} (seq INTEGER PRIMARY KEY, {', '.join(table.insert_columns)})"
        )
    return database


@dataclass(frozen=True, slots=True)
class Bare:
    key: str
    name: str
    make: Callable[[Path], SqliteDatabase]


BARE = (
    Bare("ratio_raw", "the same tables", bare_database),
    Bare("ratio_heap", "tables without indexes", heap_database),
)


def encoded(talks: Talks) -> list[tuple[Table, Values]]:
    """The rows that a store would write, in the order in which agents in turn bring them."""
    rows: list[tuple[Table, Values]] = []
    for start in range(0, len(talks), IN_FLIGHT):
        part = talks[start : start + IN_FLIGHT]
        for turn in range(len(part[0][1])):
            for session, calls in part:
                if turn == 0:
                    rows.append((SESSIONS, list(SESSIONS.values(encode_session(session, None)))))
                rows.append((CALLS, list(encode_call(calls[turn]).values)))
    return rows


def bytes_of(values: Values) -> int:
    sizes = (len(v.encode() if isinstance(v, str) else v) for v in values if isinstance(v, str | bytes))
    return sum(sizes)


def insert(database: SqliteDatabase, rows: Sequence[tuple[Table, Values]], calls_per_commit: int) -> float:
    """Seconds."""
    statements = {
        table.name: f"INSERT INTO {table.name} ({', '.join(table.insert_columns)}) "
        f"VALUES ({', '.join('?' for _ in table.insert_columns)})"
        for table in (SESSIONS, CALLS)
    }
    in_transaction = 0
    began = time.perf_counter()
    database.execute("BEGIN IMMEDIATE")
    for table, values in rows:
        if in_transaction == calls_per_commit:
            database.execute("COMMIT")
            database.execute("BEGIN IMMEDIATE")
            in_transaction = 0
        database.execute(statements[table.name], values)
        if table is CALLS:
            in_transaction += 1
    database.execute("COMMIT")
    return time.perf_counter() - began
