"""The store of a simulated process: the real store's queries on a shared in-memory database.

A write waits at a gate, runs in one transaction, and waits at a second gate. At the second gate, it has been
committed, but its caller has not received the result yet.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from instar.store import calls as call_queries
from instar.store.base import CallDelta, Store
from instar.store.database import Database
from instar.store.schema import TABLES
from instar.store.schema_indexes import INDEXES, TRIGGERS
from instar.store.sessions import make_lease_check
from instar.store.sqlite_database import SqliteDatabase
from instar.types import Call
from torture_parts.event_loop import current_process
from torture_parts.world import Process, World

T = TypeVar("T")

RUN = "run"


def create_database() -> SqliteDatabase:
    """Return an empty in-memory database.

    Reuse it for many schedules, because compiling the statements takes longer than running them.
    """
    database = sqlite3.connect(
        ":memory:",
        isolation_level=None,
        check_same_thread=False,
        factory=SqliteDatabase,
        cached_statements=512,
    )
    database.path = Path(":memory:")
    database.row_factory = sqlite3.Row
    for statement in (*(table.create_sql for table in TABLES), *INDEXES, *TRIGGERS):
        database.execute(statement)
    return database


def clear_database(database: SqliteDatabase) -> None:
    database.rollback()
    database.execute("PRAGMA foreign_keys = OFF")
    for table in TABLES:
        database.execute(f"DELETE FROM {table.name}")
    database.execute("PRAGMA foreign_keys = ON")


def get_query_name(work: Callable[[Any], Any]) -> str:
    """Return the name of the query that ``work``, a callback from a `Store` method, runs."""
    code, cells = getattr(work, "__code__", None), getattr(work, "__closure__", None)
    if code is not None and cells and "query" in code.co_freevars:
        return cells[code.co_freevars.index("query")].cell_contents.__name__
    return type(work).__name__ if code is None else code.co_name


class SimulatedStore(Store):
    def __init__(self, world: World, database: SqliteDatabase, on_commit: Callable[[str], None]) -> None:
        """``on_commit`` is called with the name of each write after its transaction has been committed."""
        # Reads stay on this thread, so no reader pool is needed.
        super().__init__("the simulated store", None, None)  # pyright: ignore[reportArgumentType]
        self.world = world
        self.database = database
        self._on_commit = on_commit
        process = current_process.get()
        assert isinstance(process, Process), "only a process may open the store"
        self._check_lease = make_lease_check(RUN, process.name, process.lease)

    async def write(self, work: Callable[[Database], T]) -> T:
        name = get_query_name(work)
        await self.world.pass_gate(name)
        result = self.commit(work)
        self._on_commit(name)
        await self.world.pass_gate(f"{name} done")
        return result

    def commit(self, work: Callable[[Database], Any]) -> Any:
        """Run the write in its own transaction, like the real writer."""
        database = self.database
        if isinstance(work, call_queries.AddCalls):
            work.prepare()
        database.begin()
        try:
            self._check_lease(database)
            result = work(database)
            database.commit()
        except Exception as error:  # any error in a write is raised in its caller
            database.rollback()
            if isinstance(error, database.errors):
                raise database.translate(error) from error
            raise
        if isinstance(work, call_queries.AddCalls):
            work.on_committed()
        return result

    async def read(self, fetch: Callable[[Database], T]) -> T:
        await self.world.pass_gate(get_query_name(fetch))
        return fetch(self.database)

    async def read_statement(self, fetch: Callable[[Database], T]) -> T:
        return await self.read(fetch)

    async def call_deltas(self, session_id: str) -> list[CallDelta]:
        await self.world.pass_gate("call_deltas")
        return call_queries.fetch_deltas(self.database, session_id).decode_deltas()

    async def _read_calls(self, fetch: Callable[[Database], call_queries.FetchedCalls]) -> list[Call]:
        await self.world.pass_gate("calls")
        return fetch(self.database).decode()

    async def close(self) -> None:
        return
