"""SQL of calls: functions of a connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field

from instar.errors import StoreError
from instar.store.call_rows import EncodedCall, check_base, decode_calls
from instar.store.schema import CALLS
from instar.types import Call

# A call with every call it stands on, the furthest first.
_CHAIN = """
    WITH RECURSIVE chain (call_id, base_id, depth) AS (
      SELECT call_id, base_id, 0 FROM calls WHERE call_id = ?
      UNION ALL
      SELECT calls.call_id, calls.base_id, depth + 1 FROM chain JOIN calls ON calls.call_id = chain.base_id
    )
    SELECT calls.* FROM chain JOIN calls ON calls.call_id = chain.call_id ORDER BY depth DESC"""


@dataclass(slots=True)
class Fetched:
    """Rows as read, to be decoded once the read transaction has ended."""

    rows: list[sqlite3.Row]
    wanted: list[str]
    tools: dict[str, str] = field(default_factory=dict[str, str])

    def decode(self) -> list[Call]:
        return decode_calls(self.rows, self.tools, self.wanted)


def add_calls(db: sqlite3.Connection, calls: Sequence[EncodedCall]) -> None:
    for call in calls:
        if call.row["base_id"] is not None:
            base = db.execute(
                "SELECT prompt_tokens, sampled_tokens, sequence_crc, message_count FROM calls "
                "WHERE call_id = ?",
                (call.row["base_id"],),
            ).fetchone()
            check_base(call, base)
        if call.tools is not None:
            db.execute("INSERT OR IGNORE INTO tools (hash, body) VALUES (?, ?)", call.tools)
        try:
            db.execute(CALLS.insert, call.row)
        except sqlite3.IntegrityError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
                raise
            raise StoreError(
                f"call {call.row['call_id']}: there is no session {call.row['session_id']}"
            ) from error


def fetch_call(db: sqlite3.Connection, call_id: str) -> Fetched:
    rows = db.execute(_CHAIN, (call_id,)).fetchall()
    return _with_tools(db, Fetched(rows, [call_id] if rows else []))


def fetch_calls(db: sqlite3.Connection, session_id: str) -> Fetched:
    own = db.execute("SELECT * FROM calls WHERE session_id = ? ORDER BY seq", (session_id,)).fetchall()
    there = {row["call_id"] for row in own}
    outside: dict[str, sqlite3.Row] = {}
    for base_id in {row["base_id"] for row in own} - there - {None}:
        for row in db.execute(_CHAIN, (base_id,)):
            if row["call_id"] not in there:
                outside.setdefault(row["call_id"], row)
    # A base is committed before what stands on it, so the order of commits suits every chain.
    rows = sorted([*outside.values(), *own], key=lambda row: int(row["seq"])) if outside else own
    return _with_tools(db, Fetched(rows, [row["call_id"] for row in own]))


def _with_tools(db: sqlite3.Connection, fetched: Fetched) -> Fetched:
    for digest in {row["tools_hash"] for row in fetched.rows} - {None}:
        body = db.execute("SELECT body FROM tools WHERE hash = ?", (digest,)).fetchone()
        fetched.tools[digest] = body["body"]
    return fetched
