"""Queries for calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from instar.errors import StoreError
from instar.store.call_rows import (
    DELTA_COLUMNS,
    BaseCallSummary,
    EncodedCall,
    check_base,
    decode_calls,
    decode_delta,
    encode_call,
)
from instar.store.codec import DatabaseRow, load_message, sanitize_text
from instar.store.database import Database
from instar.store.models import CallDelta
from instar.store.rows import encode_session
from instar.store.schema import CALLS, SESSIONS
from instar.store.writer import BatchableWrite
from instar.types import Call, Channel, Session, SessionStatus, Tool

# A call and all of its base calls, the root first.
_CHAIN = """
    WITH RECURSIVE chain (call_id, base_id, depth) AS (
      SELECT call_id, base_id, 0 FROM calls WHERE call_id = ?
      UNION ALL
      SELECT calls.call_id, calls.base_id, depth + 1 FROM chain JOIN calls ON calls.call_id = chain.base_id
    )
    SELECT calls.* FROM chain JOIN calls ON calls.call_id = chain.call_id ORDER BY depth DESC"""

TAIL_KEY_BYTES = 16

# The keys are passed as one value, so that the statement is the same for any number of them. The newest call
# of a key has the highest row number, and the index of tail keys is in that order.
_BY_TAIL = f"""
    WITH RECURSIVE requested (place, tail_key) AS (
      SELECT 0, substr(:keys, 1, {TAIL_KEY_BYTES})
      UNION ALL
      SELECT place + 1, substr(:keys, {TAIL_KEY_BYTES} * (place + 1) + 1, {TAIL_KEY_BYTES}) FROM requested
      WHERE {TAIL_KEY_BYTES} * (place + 1) < length(:keys)
    )
    SELECT session_id FROM (
      SELECT place, (
        SELECT s.session_id FROM calls CROSS JOIN sessions s
        WHERE calls.tail_key = requested.tail_key AND s.session_id = calls.session_id
          AND s.run_id = :run_id AND s.agent_id = :agent_id AND s.channel = :live AND s.status = :open
        ORDER BY calls.seq DESC LIMIT 1) AS session_id
      FROM requested) AS matches
    WHERE session_id IS NOT NULL ORDER BY place LIMIT 1"""


# --- writing ------------------------------------------------------------------------------------


class BaseCallCache:
    """A cache of summaries of the calls that this process stored last. A stored call never changes, so a
    summary stays valid."""

    def __init__(self, max_size: int = 4096) -> None:
        self.max_size = max_size
        self._summaries: dict[str, BaseCallSummary] = {}

    def get(self, call_id: str) -> BaseCallSummary | None:
        return self._summaries.get(call_id)

    def add(self, calls: Iterable[EncodedCall]) -> None:
        """Add calls that have been committed."""
        if len(self._summaries) > self.max_size:
            self._summaries.clear()  # summaries still in use are read from the database once more
        for call in calls:
            self._summaries[call.call_id] = call.base_summary


class AddCalls(BatchableWrite):
    """Writes calls, and the session that they open, if any."""

    def __init__(
        self,
        calls: Sequence[Call],
        opening: Session | None,
        key_hash: str | None,
        tail_keys: Mapping[str, bytes],
        bases: BaseCallCache,
    ) -> None:
        self._inputs = (calls, opening, key_hash, tail_keys)
        self._bases = bases
        self._calls: list[EncodedCall] = []
        self._opening: dict[str, Any] | None = None

    def prepare(self) -> None:
        calls, opening, key_hash, tail_keys = self._inputs
        self._calls = [encode_call(call, tail_keys.get(call.call_id)) for call in calls]
        self._opening = None if opening is None else encode_session(opening, key_hash)

    def on_committed(self) -> None:
        self._bases.add(self._calls)

    def __call__(self, db: Database) -> None:
        self._write(db, [self], check=True)

    def write_batch(self, db: Database, others: Sequence[AddCalls]) -> None:
        # A missing session violates the foreign key of the whole batch. The single writes that follow show
        # which session is missing.
        self._write(db, [self, *others], check=bool(db.for_update))

    def write_single(self, db: Database, others: Sequence[AddCalls]) -> bool:
        works = (self, *others)
        if any(work._opening is not None for work in works):
            return False
        calls = [call for work in works for call in work._calls]
        for call in calls:
            if (base_id := call.base_id) is not None:
                if (base := self._bases.get(base_id)) is None:
                    return False
                check_base(call, base)
        # If a session or its tools are missing, the foreign keys reject the statement.
        return db.insert_autocommit(CALLS, [call.values for call in calls])

    @staticmethod
    def _write(db: Database, works: Sequence[AddCalls], *, check: bool) -> None:
        calls = [call for work in works for call in work._calls]
        openings = [work._opening for work in works if work._opening is not None]
        db.insert(SESSIONS, [SESSIONS.values(row) for row in openings])
        if check:
            _lock_sessions(db, calls, {row["session_id"] for row in openings})
        _check_bases(db, calls, works[0]._bases)
        for tools in sorted({call.tools for call in calls if call.tools is not None}):
            db.execute("INSERT INTO tools (hash, body) VALUES (?, ?) ON CONFLICT (hash) DO NOTHING", tools)
        db.insert(CALLS, [call.values for call in calls])


def _lock_sessions(db: Database, calls: Sequence[EncodedCall], opened: Set[str]) -> None:
    """Lock the sessions of the calls, so that the calls of each session are numbered in commit order."""
    session_ids = {call.session_id for call in calls} - opened
    if not session_ids:
        return
    rows = db.execute(
        f"SELECT session_id FROM sessions WHERE session_id IN ({db.json_texts.format('?')}) "
        f"ORDER BY session_id{db.for_update}",
        (json.dumps(sorted(session_ids)),),
    )
    if missing := session_ids - {row["session_id"] for row in rows}:
        call = next(call for call in calls if call.session_id in missing)
        raise StoreError(f"Call {call.call_id}: there is no session {call.session_id}.")


def _check_bases(db: Database, calls: Sequence[EncodedCall], known: BaseCallCache) -> None:
    unknown = {
        base_id for call in calls if (base_id := call.base_id) is not None and known.get(base_id) is None
    }
    summaries = _read_summaries(db, sorted(unknown)) if unknown else {}
    for call in calls:
        if (base_id := call.base_id) is not None:
            check_base(call, summaries.get(base_id) or known.get(base_id))
        if unknown:  # this call may be the base of a later one
            summaries.setdefault(call.call_id, call.base_summary)


def _read_summaries(db: Database, call_ids: Sequence[str]) -> dict[str, BaseCallSummary]:

    # All in one row: fetching a row releases the interpreter lock, which a busy event loop gives back late.
    columns = db.json_rows.format(", ".join(("call_id", *BaseCallSummary._fields)))
    sql = f"SELECT {columns} AS summaries FROM calls WHERE call_id IN ({db.json_texts.format('?')})"
    rows = json.loads(db.execute(sql, (json.dumps(call_ids),)).fetchone()["summaries"])
    return {call_id: BaseCallSummary._make(summary) for call_id, *summary in rows}


# --- reading ------------------------------------------------------------------------------------


@dataclass(slots=True)
class FetchedCalls:
    """Rows of calls, to be decoded after the read transaction has ended."""

    rows: list[DatabaseRow]
    call_ids: list[str]
    tools: dict[str, str] = field(default_factory=dict[str, str])

    def decode(self) -> list[Call]:
        return decode_calls(self.rows, self.tools, self.call_ids)

    def decode_deltas(self) -> list[CallDelta]:
        tools: dict[str, tuple[Tool, ...]] = {
            key: tuple(load_message(body)) for key, body in self.tools.items()
        }
        return [decode_delta(row, tools) for row in self.rows]


def fetch_call(db: Database, call_id: str) -> FetchedCalls:
    rows = db.execute(_CHAIN, (sanitize_text(call_id),)).fetchall()
    return _with_tools(db, FetchedCalls(rows, [call_id] if rows else []))


def fetch_calls(db: Database, column: str, *values: str) -> FetchedCalls:
    """Return the rows of the calls with one of these values in ``column``, and the rows of their base
    calls."""
    marks = ", ".join("?" * len(values))
    own = db.execute(
        f"SELECT * FROM calls WHERE {column} IN ({marks}) ORDER BY seq",
        [sanitize_text(value) for value in values],
    ).fetchall()
    own_ids = {row["call_id"] for row in own}
    outside: dict[str, DatabaseRow] = {}
    for base_id in {row["base_id"] for row in own} - own_ids - {None}:
        for row in db.execute(_CHAIN, (base_id,)):
            if row["call_id"] not in own_ids:
                outside.setdefault(row["call_id"], row)
    # A base is committed before the calls that extend it, so commit order is right for every chain.
    rows = sorted([*outside.values(), *own], key=lambda row: int(row["seq"])) if outside else own
    return _with_tools(db, FetchedCalls(rows, [row["call_id"] for row in own]))


def fetch_deltas(db: Database, session_id: str) -> FetchedCalls:
    rows = db.execute(
        f"SELECT {DELTA_COLUMNS} FROM calls WHERE session_id = ? ORDER BY seq", (session_id,)
    ).fetchall()
    fetched = FetchedCalls(rows, [])
    _add_tools(db, fetched, [row for row in rows if row["messages"] is not None])
    return fetched


def _with_tools(db: Database, fetched: FetchedCalls) -> FetchedCalls:
    _add_tools(db, fetched, fetched.rows)
    return fetched


def _add_tools(db: Database, fetched: FetchedCalls, rows: Iterable[DatabaseRow]) -> None:
    for digest in {row["tools_hash"] for row in rows} - {None}:
        body = db.execute("SELECT body FROM tools WHERE hash = ?", (digest,)).fetchone()
        fetched.tools[digest] = body["body"]


def get_session_by_tail(db: Database, run_id: str, agent_id: str, keys: Sequence[bytes]) -> str | None:
    """Return the id of an open live session, or None. The first tail key that has calls in such sessions
    decides: the session of its newest call is returned."""
    if not keys:
        return None
    if any(len(key) != TAIL_KEY_BYTES for key in keys):
        raise StoreError(f"A tail key must have {TAIL_KEY_BYTES} bytes.")
    values = {
        "keys": b"".join(keys),
        "run_id": run_id,
        "agent_id": agent_id,
        "live": Channel.LIVE.value,
        "open": SessionStatus.OPEN.value,
    }
    row = db.execute(_BY_TAIL, values).fetchone()
    return None if row is None else row["session_id"]
