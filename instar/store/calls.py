"""Queries for calls, and the write that stores imported sessions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from instar.errors import ConflictError, SessionNotFound, StoreError
from instar.store import annotations, sessions
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
from instar.store.forgetting import lock_and_find_forgotten
from instar.store.models import RESAMPLED_TAG, CallDelta, SessionRecord, StoredReply
from instar.store.rows import REPLY_ROWS, encode_session
from instar.store.schema import CALLS, SESSIONS
from instar.types import Call, Channel, Group, Json, Message, Session, SessionStatus, Tool

# A call and all of its base calls, root first.
_CHAIN_SQL = """
    WITH RECURSIVE chain (call_id, base_id, depth) AS (
      SELECT call_id, base_id, 0 FROM calls WHERE call_id = ?
      UNION ALL
      SELECT calls.call_id, calls.base_id, depth + 1 FROM chain JOIN calls ON calls.call_id = chain.base_id
    )
    SELECT calls.* FROM chain JOIN calls ON calls.call_id = chain.call_id ORDER BY depth DESC"""

TAIL_KEY_BYTES = 16
"""The length of a tail key, which is a hash of a call's messages and reply."""
MAX_SESSIONS_PER_TAIL = 8
_MAX_CALLS_PER_TAIL = 64

_OPEN_LIVE_CONDITION = """s.session_id = calls.session_id AND s.run_id = :run_id AND s.agent_id = :agent_id
        AND s.channel = :live AND s.status = :open"""
# The keys are passed as one value, so that the statement is the same for any number of keys. The index orders
# the calls with a tail key by row number, so the newest ones are found without sorting.
_BY_TAIL_SQL = f"""
    WITH RECURSIVE requested (idx, tail_key) AS (
      SELECT 0, substr(:keys, 1, {TAIL_KEY_BYTES})
      UNION ALL
      SELECT idx + 1, substr(:keys, {TAIL_KEY_BYTES} * (idx + 1) + 1, {TAIL_KEY_BYTES}) FROM requested
      WHERE {TAIL_KEY_BYTES} * (idx + 1) < length(:keys)
    )
    SELECT session_id FROM (
      SELECT s.session_id, calls.seq FROM calls CROSS JOIN sessions s
      WHERE calls.tail_key = (
        SELECT tail_key FROM requested WHERE EXISTS (
          SELECT 1 FROM calls CROSS JOIN sessions s
          WHERE calls.tail_key = requested.tail_key AND {_OPEN_LIVE_CONDITION})
        ORDER BY idx LIMIT 1) AND {_OPEN_LIVE_CONDITION}
      ORDER BY calls.seq DESC LIMIT {_MAX_CALLS_PER_TAIL}) AS newest
    GROUP BY session_id ORDER BY max(seq) DESC LIMIT {MAX_SESSIONS_PER_TAIL}"""

_INSERT_USER = (
    "INSERT INTO session_users (session_id, user_id, run_id) SELECT session_id, ?, run_id FROM sessions "
    "WHERE session_id = ? ON CONFLICT DO NOTHING"
)


# --- writing ------------------------------------------------------------------------------------


class BaseCallCache:
    """Caches summaries of recently stored calls. They stay valid, because stored calls never change."""

    def __init__(self, max_size: int = 4096) -> None:
        self.max_size = max_size
        self._summaries: dict[str, BaseCallSummary] = {}

    def get(self, call_id: str) -> BaseCallSummary | None:
        return self._summaries.get(call_id)

    def add(self, calls: Iterable[EncodedCall]) -> None:
        if len(self._summaries) > self.max_size:
            self._summaries.clear()  # summaries that are needed again are read from the database
        for encoded in calls:
            self._summaries[encoded.call.call_id] = encoded.summary


class AddCalls:
    """Stores calls and, if there is a new session, that session. The writer combines several such writes."""

    def __init__(
        self,
        calls: Sequence[Call],
        new_session: Session | None,
        key_hash: str | None,
        tail_keys: Mapping[str, bytes],
        cache: BaseCallCache,
        users: Sequence[str] = (),
        response_fields: Json | None = None,
    ) -> None:
        self._inputs = (calls, new_session, key_hash, tail_keys, response_fields)
        self._users = sorted({(user_id, call.session_id) for call in calls for user_id in users})
        self._cache = cache
        self._calls: list[EncodedCall] = []
        self._session_row: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Do the work that does not need the database. The writer does it before the transaction begins, and
        `put_records`, whose store is rarely used by others, in it."""
        calls, new_session, key_hash, tail_keys, fields = self._inputs
        self._calls = [encode_call(call, tail_keys.get(call.call_id), fields) for call in calls]
        self._session_row = None if new_session is None else encode_session(new_session, key_hash)

    def on_committed(self) -> None:
        """Called after the write is on disk and its caller has been notified."""
        self._cache.add(self._calls)

    def __call__(self, db: Database) -> None:
        self._write(db, [self], check_sessions=True)

    @staticmethod
    def write_batch(db: Database, writes: Sequence[AddCalls]) -> None:
        """Perform the writes. If one fails, the writer undoes all and repeats them one by one."""
        # SQLite needs no check: a missing session violates a foreign key and fails the batch. The writes are
        # then repeated with the check.
        AddCalls._write(db, writes, check_sessions=bool(db.for_update))

    @staticmethod
    def write_in_one_statement(db: Database, writes: Sequence[AddCalls]) -> bool:
        """Write in one autocommitted statement. Return False and write nothing if one is not enough."""
        if any(write._session_row is not None or write._users for write in writes):
            return False
        calls = [call for write in writes for call in write._calls]
        for encoded in calls:
            if (base_id := encoded.call.base_id) is not None:
                if (base := writes[0]._cache.get(base_id)) is None:
                    return False
                check_base(encoded, base)
        # If a session or its tools are missing, the foreign keys reject the statement.
        return db.insert_autocommit(CALLS, [encoded.values for encoded in calls])

    @staticmethod
    def _write(db: Database, writes: Sequence[AddCalls], *, check_sessions: bool) -> None:
        calls = [encoded for write in writes for encoded in write._calls]
        session_rows = [write._session_row for write in writes if write._session_row is not None]
        db.insert(SESSIONS, [SESSIONS.to_values(row) for row in session_rows])
        if check_sessions:
            _check_and_lock_sessions(db, calls, {row["session_id"] for row in session_rows})
        _check_bases(db, calls, writes[0]._cache)
        for tools in sorted({encoded.tools for encoded in calls if encoded.tools is not None}):
            db.execute("INSERT INTO tools (hash, body) VALUES (?, ?) ON CONFLICT (hash) DO NOTHING", tools)
        for user in [user for write in writes for user in write._users]:
            db.execute(_INSERT_USER, user)
        db.insert(CALLS, [encoded.values for encoded in calls])


def _check_and_lock_sessions(db: Database, calls: Sequence[EncodedCall], opened: Set[str]) -> None:
    """Lock the calls' sessions, except those just ``opened``, so that calls are numbered in commit order.
    Raises SessionNotFound if a session does not exist."""
    call_id_by_session = {encoded.call.session_id: encoded.call.call_id for encoded in calls}
    session_ids = sorted(call_id_by_session.keys() - opened)
    if not session_ids:
        return
    rows = db.execute(
        f"SELECT session_id FROM sessions WHERE session_id IN ({db.json_array_sql.format('?')}) "
        f"ORDER BY session_id{db.for_update}",
        (json.dumps(session_ids),),
    )
    if missing := set(session_ids) - {row["session_id"] for row in rows}:
        session_id = min(missing)
        raise SessionNotFound(
            f"cannot store call {call_id_by_session[session_id]}: there is no session {session_id}"
        )


def _check_bases(db: Database, calls: Sequence[EncodedCall], cache: BaseCallCache) -> None:
    base_ids = {encoded.call.base_id for encoded in calls} - {None}
    uncached = sorted(base_id for base_id in base_ids if base_id is not None and cache.get(base_id) is None)
    summaries = _read_summaries(db, uncached) if uncached else {}
    for encoded in calls:
        if (base_id := encoded.call.base_id) is not None:
            check_base(encoded, summaries.get(base_id) or cache.get(base_id))
        if uncached:  # this call may be the base of a later one
            summaries.setdefault(encoded.call.call_id, encoded.summary)


def _read_summaries(db: Database, call_ids: Sequence[str]) -> dict[str, BaseCallSummary]:
    # Fetch one row only: each fetch releases the GIL, and a busy event loop is slow to give it back.
    columns = db.json_rows_sql.format(", ".join(("call_id", *BaseCallSummary._fields)))
    sql = f"SELECT {columns} AS summaries FROM calls WHERE call_id IN ({db.json_array_sql.format('?')})"
    rows = json.loads(db.execute(sql, (json.dumps(call_ids),)).fetchone()["summaries"])
    return {call_id: BaseCallSummary._make(summary) for call_id, *summary in rows}


def put_records(db: Database, groups: Sequence[Group], records: Sequence[SessionRecord]) -> None:
    """Store imported groups and sessions atomically. Raises ConflictError if one of the ids is taken, or if a
    session, or the live session whose prompt it repeats, was deleted."""
    tags = [tag for record in records for tag in record.tags if tag.name == RESAMPLED_TAG]
    session_ids = {*(record.session.session_id for record in records), *(tag.value for tag in tags)}
    if forgotten := lock_and_find_forgotten(db, session_ids):
        raise ConflictError(
            f"the data of session {min(forgotten)} was deleted from this store, so it cannot be imported "
            "again; remove the session and replies to its prompt from the data"
        )
    for group in groups:
        sessions.open_group(db, group)
    for record in records:
        write = AddCalls(record.calls, record.session, None, {}, BaseCallCache())
        write.prepare()
        write(db)
        _add_annotations(db, record)


def _add_annotations(db: Database, record: SessionRecord) -> None:
    for reward in record.rewards:
        if sessions.has_reward(db, reward.reward_id):
            raise ConflictError(f"reward {reward.reward_id} of session {reward.session_id} already exists")
    sessions.add_rewards(db, record.rewards)
    annotations.record_scores(db, record.scores, [])
    annotations.add_tags(db, record.tags)
    for feedback in record.feedback:
        if not annotations.add_feedback(db, feedback):
            raise ConflictError(f"feedback {feedback.feedback_id} already exists")


# --- reading ------------------------------------------------------------------------------------


@dataclass(slots=True)
class FetchedCalls:
    """Calls that are decoded after the read transaction has ended."""

    rows: list[DatabaseRow]
    """The rows of the calls and, for `decode`, of their base calls."""
    call_ids: list[str]
    """The calls that `decode` returns."""
    tools: dict[str, str]
    """The tools of the calls as JSON, by hash."""

    def decode(self) -> list[Call]:
        return decode_calls(self.rows, self._decode_tools(), self.call_ids)

    def decode_deltas(self) -> list[CallDelta]:
        tools = self._decode_tools()
        return [decode_delta(row, tools) for row in self.rows]

    def _decode_tools(self) -> dict[str, tuple[Tool, ...]]:
        return {key: tuple(load_message(body)) for key, body in self.tools.items()}


def fetch_call(db: Database, call_id: str) -> FetchedCalls:
    rows = db.execute(_CHAIN_SQL, (sanitize_text(call_id),)).fetchall()
    return FetchedCalls(rows, [call_id] if rows else [], _fetch_tools(db, rows))


def fetch_calls(db: Database, column: str, *values: str) -> FetchedCalls:
    """Fetch the calls that have one of these values in ``column``, and their base calls."""
    placeholders = ", ".join("?" * len(values))
    matching_rows = db.execute(
        f"SELECT * FROM calls WHERE {column} IN ({placeholders}) ORDER BY seq",
        [sanitize_text(value) for value in values],
    ).fetchall()
    matching_ids = {row["call_id"] for row in matching_rows}
    base_rows: dict[str, DatabaseRow] = {}
    for base_id in {row["base_id"] for row in matching_rows} - matching_ids - {None}:
        for row in db.execute(_CHAIN_SQL, (base_id,)):
            if row["call_id"] not in matching_ids:
                base_rows.setdefault(row["call_id"], row)
    # A base is committed before the calls that extend it, so commit order is valid for every chain.
    rows = matching_rows
    if base_rows:
        rows = sorted([*base_rows.values(), *matching_rows], key=lambda row: int(row["seq"]))
    return FetchedCalls(rows, [row["call_id"] for row in matching_rows], _fetch_tools(db, rows))


def get_replies(db: Database, request_ids: Sequence[str]) -> list[StoredReply]:
    """Return the replies to these requests, oldest first."""
    columns, ids = ", ".join(REPLY_ROWS.names), db.json_array_sql.format("?")
    sql = f"SELECT {columns} FROM calls WHERE request_id IN ({ids}) ORDER BY seq"
    return REPLY_ROWS.select(db, sql, (json.dumps([sanitize_text(value) for value in request_ids]),))


def fetch_deltas(db: Database, session_id: str) -> FetchedCalls:
    rows = db.execute(
        f"SELECT {DELTA_COLUMNS} FROM calls WHERE session_id = ? ORDER BY seq", (session_id,)
    ).fetchall()
    return FetchedCalls(rows, [], _fetch_tools(db, [row for row in rows if row["messages"] is not None]))


def get_first_call_id(db: Database, session_id: str) -> str | None:
    sql = "SELECT call_id FROM calls WHERE session_id = ? ORDER BY seq LIMIT 1"
    row = db.execute(sql, (session_id,)).fetchone()
    return None if row is None else row["call_id"]


def get_first_messages(db: Database, session_ids: Sequence[str], role: str) -> dict[str, str]:
    """Return the text of the first message with this role in each session's first call, by session id."""
    return {
        session_id: next((message["content"] for message in messages if message["role"] == role), "")
        for session_id, messages in get_first_prompts(db, session_ids).items()
    }


def get_first_prompts(db: Database, session_ids: Sequence[str]) -> dict[str, list[Message]]:
    """Return the messages of each session's first call, by session id. Sessions without calls are omitted."""
    rows = db.execute(
        "SELECT session_id, messages FROM calls WHERE seq IN (SELECT MIN(seq) FROM calls "
        f"WHERE session_id IN ({db.json_array_sql.format('?')}) GROUP BY session_id)",
        (json.dumps(list(session_ids)),),
    )
    return {row["session_id"]: load_message(row["messages"]) for row in rows}


def _fetch_tools(db: Database, rows: Iterable[DatabaseRow]) -> dict[str, str]:
    sql = "SELECT body FROM tools WHERE hash = ?"
    hashes = {row["tools_hash"] for row in rows} - {None}
    return {digest: db.execute(sql, (digest,)).fetchone()["body"] for digest in hashes}


def get_sessions_by_tail(db: Database, run_id: str, agent_id: str, keys: Sequence[bytes]) -> list[str]:
    """Return the ids of open live sessions with a call that has the tail key, newest call first, but at most
    MAX_SESSIONS_PER_TAIL. The keys are tried in order until one of them matches."""
    if not keys:
        return []
    if lengths := {len(key) for key in keys} - {TAIL_KEY_BYTES}:
        raise StoreError(f"a tail key must have {TAIL_KEY_BYTES} bytes, got {min(lengths)}")
    values = {
        "keys": b"".join(keys),
        "run_id": run_id,
        "agent_id": agent_id,
        "live": Channel.LIVE.value,
        "open": SessionStatus.OPEN.value,
    }
    return [row["session_id"] for row in db.execute(_BY_TAIL_SQL, values).fetchall()]
