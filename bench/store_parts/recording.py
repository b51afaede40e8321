"""Measure how many calls per second the store records, compared with bare inserts of the same rows.

The two alternate in rounds, so that other load on the machine affects both. Bare inserts write rows that were
encoded in advance, in a single thread, with the store's pragmas and number of calls per transaction.
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
from instar.store.schema import CALLS, SESSIONS
from instar.store.sqlite import SqliteStore
from instar.store.sqlite_database import SqliteDatabase, connect, get_counter_path
from instar.store.table import Table
from instar.types import Call, Session
from store_parts.calls import make_session, make_turns

AGENT_COUNT = 32


@dataclass(frozen=True, slots=True)
class CallLoad:
    name: str
    size: int
    """The number of bytes that each call adds."""
    turns: int
    """The number of calls per session."""
    calls: int
    """The number of calls per round."""


LOADS = (CallLoad("4 KB", 4_000, 8, 1024), CallLoad("400 KB", 400_000, 1, 128))


@dataclass(frozen=True, slots=True)
class Rates:
    """Calls per second recorded by the store and by bare inserts, and the ratio of the two."""

    load_name: str
    target_name: str
    row_bytes: int
    """The size of a call's row."""
    store_rate: float
    bare_rate: float
    ratio: float
    """``store_rate / bare_rate``."""
    calls_per_commit: float

    def to_json(self) -> dict[str, str | float]:
        return {
            "load": self.load_name,
            "bare": self.target_name,
            "bytes": self.row_bytes,
            "store": self.store_rate,
            "raw": self.bare_rate,
            "ratio": self.ratio,
            "rows_per_commit": self.calls_per_commit,
        }


Conversations = list[tuple[Session, list[Call]]]


async def measure(load: CallLoad, target: InsertTarget, folder: Path, rounds: int) -> Rates:
    path = folder / f"store-{target.file_name}-{load.size}.db"
    bare_path = folder / f"bare-{target.file_name}-{load.size}.db"
    bare_database = target.create(bare_path)
    store = SqliteStore(path)
    store_total = bare_total = 0.0
    calls_per_commit_by_round: list[float] = []
    row_bytes = 0
    try:
        for round_index in range(rounds + 1):
            conversations = make_conversations(load)
            commits = store.commit_count
            store_seconds = await record_calls(store, conversations)
            calls_per_commit = load.calls / (store.commit_count - commits)
            rows = encode_rows(make_conversations(load))
            row_bytes = count_bytes(rows[-1][1])
            bare_seconds = insert_rows(bare_database, rows, max(1, round(calls_per_commit)))
            if round_index:  # the first round is a warm-up
                store_total += store_seconds
                bare_total += bare_seconds
                calls_per_commit_by_round.append(calls_per_commit)
    finally:
        await store.close()
        bare_database.close()
        path.unlink()
        bare_path.unlink()
    calls = load.calls * rounds
    calls_per_commit = statistics.median(calls_per_commit_by_round)
    return Rates(
        load.name,
        target.name,
        row_bytes,
        calls / store_total,
        calls / bare_total,
        bare_total / store_total,
        calls_per_commit,
    )


def make_conversations(load: CallLoad) -> Conversations:
    sessions = [make_session() for _ in range(load.calls // load.turns)]
    return [(session, list(make_turns(session, load.size, load.turns))) for session in sessions]


async def record_calls(store: SqliteStore, conversations: Conversations) -> float:
    """Record the calls with AGENT_COUNT agents that wait for each commit. Return the duration in seconds."""
    remaining = iter(conversations)

    async def run_agent() -> None:
        for session, calls in remaining:
            await store.add_calls(calls[:1], new_session=session)
            for call in calls[1:]:
                await store.add_calls([call])

    started_at = time.perf_counter()
    await asyncio.gather(*(run_agent() for _ in range(AGENT_COUNT)))
    return time.perf_counter() - started_at


async def measure_counter_overhead(folder: Path, rounds: int) -> float:
    """Return the CPU time that the counter of acknowledged calls adds, as a fraction. Stores with and without
    it alternate in rounds, and the result is the median of all rounds."""
    path_without = folder / "without-counter.db"
    path_without.touch()
    get_counter_path(path_without).mkdir()  # The store works without the counter if it cannot be opened.
    stores = [SqliteStore(folder / "with-counter.db"), SqliteStore(path_without)]
    ratios: list[float] = []
    for round_index in range(rounds + 1):
        seconds = [0.0, 0.0]
        for index in (0, 1) if round_index % 2 else (1, 0):
            conversations = make_conversations(LOADS[0])
            started_at = time.process_time()
            await record_calls(stores[index], conversations)
            seconds[index] = time.process_time() - started_at
        if round_index:  # the first round is a warm-up
            ratios.append(seconds[0] / seconds[1])
    for store in stores:
        await store.close()
    return statistics.median(ratios) - 1


# --- bare inserts -------------------------------------------------------------------------------

Values = list[object]


def create_store_database(path: Path) -> SqliteDatabase:
    """Create a database with the store's tables, indexes and pragmas."""
    path.touch()
    database = connect(path)
    create_or_migrate(database, path)
    return database


def create_heap_database(path: Path) -> SqliteDatabase:
    """Create a database with the store's columns, but without indexes and constraints."""
    path.touch()
    database = connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    for table in (SESSIONS, CALLS):
        database.execute(
            f"CREATE TABLE {table.name} (seq INTEGER PRIMARY KEY, {', '.join(table.insert_columns)})"
        )
    return database


@dataclass(frozen=True, slots=True)
class InsertTarget:
    name: str
    file_name: str
    """A part of the names of the database files."""
    ratio_metric: str
    """The name of the ratio in the JSON output."""
    create: Callable[[Path], SqliteDatabase]


INSERT_TARGETS = (
    InsertTarget("the same tables", "indexed", "ratio_raw", create_store_database),
    InsertTarget("tables without indexes", "heap", "ratio_heap", create_heap_database),
)


def encode_rows(conversations: Conversations) -> list[tuple[Table, Values]]:
    """Return the rows that the store would write, in the order in which concurrent agents produce them."""
    rows: list[tuple[Table, Values]] = []
    for start in range(0, len(conversations), AGENT_COUNT):
        batch = conversations[start : start + AGENT_COUNT]
        for turn in range(len(batch[0][1])):
            for session, calls in batch:
                if turn == 0:
                    rows.append((SESSIONS, list(SESSIONS.to_values(encode_session(session, None)))))
                rows.append((CALLS, list(encode_call(calls[turn]).values)))
    return rows


def count_bytes(values: Values) -> int:
    """Return the size of the texts and blobs among the values."""
    sizes = (len(v.encode() if isinstance(v, str) else v) for v in values if isinstance(v, str | bytes))
    return sum(sizes)


def insert_rows(
    database: SqliteDatabase, rows: Sequence[tuple[Table, Values]], calls_per_commit: int
) -> float:
    """Insert the rows with one commit per ``calls_per_commit`` calls. Return the duration in seconds."""
    statements = {
        table.name: f"INSERT INTO {table.name} ({', '.join(table.insert_columns)}) "
        f"VALUES ({', '.join('?' for _ in table.insert_columns)})"
        for table in (SESSIONS, CALLS)
    }
    uncommitted_calls = 0
    started_at = time.perf_counter()
    database.execute("BEGIN IMMEDIATE")
    for table, values in rows:
        if uncommitted_calls == calls_per_commit:
            database.execute("COMMIT")
            database.execute("BEGIN IMMEDIATE")
            uncommitted_calls = 0
        database.execute(statements[table.name], values)
        if table is CALLS:
            uncommitted_calls += 1
    database.execute("COMMIT")
    return time.perf_counter() - started_at
