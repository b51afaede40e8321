"""Creation of a store file from `schema`, and migration of an older file to the current version.

``MIGRATIONS[n]`` turns a file of version n into one of version n + 1. A released migration is never edited.
tests/unit/store/fixtures has a file of every released version to test the migrations on.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from instar.errors import StoreError, StoreNewer
from instar.store.schema import APPLICATION_ID, TABLES, VERSION
from instar.store.schema_indexes import INDEXES, TRIGGERS
from instar.store.sqlite_database import BUSY_TIMEOUT, SqliteDatabase, corrupt_file_error, is_busy

MIGRATIONS: Mapping[int, Sequence[str]] = {
    1: (
        "ALTER TABLE sessions ADD COLUMN external_id TEXT",
        "ALTER TABLE calls ADD COLUMN model TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE calls ADD COLUMN client_key TEXT",
        "ALTER TABLE calls ADD COLUMN digests BLOB NOT NULL DEFAULT x''",
        "ALTER TABLE calls ADD COLUMN tail_key BLOB",
        "ALTER TABLE groups ADD COLUMN claimed_epoch INTEGER NOT NULL DEFAULT -1",
        "UPDATE groups SET claimed_epoch = COALESCE((SELECT MAX(epoch) FROM claims "
        "WHERE claims.group_id = groups.group_id AND claims.run_id = groups.run_id), -1)",
        "CREATE TABLE keys (key_hash TEXT PRIMARY KEY, kind TEXT NOT NULL, agent_id TEXT, "
        "name TEXT NOT NULL, created_at REAL NOT NULL, revoked_at REAL)",
        "CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
        "CREATE INDEX groups_by_claim ON groups (run_id, channel, status, claimed_epoch)",
        "CREATE INDEX sessions_by_external ON sessions (run_id, agent_id, external_id) "
        "WHERE external_id IS NOT NULL",
        "DROP INDEX calls_by_session",
        "CREATE INDEX calls_by_session ON calls (session_id, ended_at, sampled_tokens)",
        "CREATE INDEX calls_by_request ON calls (request_id)",
        "CREATE INDEX calls_by_tail ON calls (tail_key) WHERE tail_key IS NOT NULL",
        "CREATE UNIQUE INDEX keys_by_name ON keys (name) WHERE revoked_at IS NULL AND name != ''",
    ),
    2: (
        "CREATE TABLE leases (run_id TEXT NOT NULL, name TEXT NOT NULL, lease INTEGER NOT NULL, "
        "PRIMARY KEY (run_id, name))",
    ),
    3: (
        "ALTER TABLE rewards ADD COLUMN reward_id TEXT",
        "ALTER TABLE rewards ADD COLUMN scorer_version TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE rewards ADD COLUMN cost REAL NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN reward REAL",
        "UPDATE sessions SET reward = (SELECT value FROM rewards "
        "WHERE rewards.session_id = sessions.session_id AND call_id IS NULL ORDER BY seq DESC LIMIT 1)",
        "CREATE TABLE scores (session_id TEXT NOT NULL REFERENCES sessions (session_id), "
        "scorer TEXT NOT NULL, run_id TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL, "
        "reason TEXT, created_at REAL NOT NULL, PRIMARY KEY (session_id, scorer))",
        "CREATE TABLE tags (session_id TEXT NOT NULL REFERENCES sessions (session_id), name TEXT NOT NULL, "
        "run_id TEXT NOT NULL, value TEXT NOT NULL, reason TEXT NOT NULL, author TEXT NOT NULL, "
        "created_at REAL NOT NULL, PRIMARY KEY (session_id, name))",
        "CREATE TABLE feedback (seq INTEGER PRIMARY KEY, feedback_id TEXT NOT NULL UNIQUE, "
        "session_id TEXT NOT NULL REFERENCES sessions (session_id), run_id TEXT NOT NULL, call_id TEXT, "
        "thumbs INTEGER, score REAL, text TEXT NOT NULL, correction TEXT, correction_ids BLOB, "
        "author TEXT NOT NULL, created_at REAL NOT NULL)",
        "CREATE TABLE judgments (key BLOB PRIMARY KEY, run_id TEXT NOT NULL, answer TEXT NOT NULL, "
        "cost REAL NOT NULL, created_at REAL NOT NULL)",
        "CREATE TABLE datasets (name TEXT NOT NULL, version INTEGER NOT NULL, path TEXT NOT NULL, "
        "hash TEXT NOT NULL, manifest TEXT NOT NULL, created_at REAL NOT NULL, PRIMARY KEY (name, version))",
        "DROP INDEX sessions_by_run",
        "CREATE INDEX sessions_by_run ON sessions "
        "(run_id, channel, status, seq, created_at, reward, agent_id)",
        "CREATE INDEX sessions_by_reward ON sessions (run_id, reward) WHERE reward IS NOT NULL",
        "CREATE INDEX sessions_by_time ON sessions (run_id, created_at)",
        "CREATE INDEX sessions_by_task ON sessions (run_id, task_id) WHERE task_id IS NOT NULL",
        "CREATE INDEX rewards_by_scorer ON rewards (run_id, source, scorer)",
        "CREATE UNIQUE INDEX rewards_by_id ON rewards (reward_id) WHERE reward_id IS NOT NULL",
        "CREATE INDEX scores_by_run ON scores (run_id, scorer, state)",
        "CREATE INDEX tags_by_name ON tags (run_id, name, value)",
        "CREATE INDEX feedback_by_session ON feedback (session_id)",
        "CREATE INDEX feedback_by_run ON feedback (run_id)",
        "CREATE INDEX judgments_by_run ON judgments (run_id)",
    ),
}


def create_or_migrate(
    connection: SqliteDatabase,
    path: Path,
    *,
    version: int = VERSION,
    migrations: Mapping[int, Sequence[str]] = MIGRATIONS,
) -> None:
    """Create the store in the file or migrate it to ``version``, in one transaction. Several processes may
    call this at the same time.

    A file of a different program or of a newer Instar is not changed.
    """
    _read_version(connection, path, version)
    _enable_wal(connection, path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        current = _read_version(connection, path, version)
        if current == 0:
            _create(connection)
            current = VERSION
        for number in range(current, version):
            for statement in migrations[number]:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    _check_tables(connection, path)


def check_version(connection: SqliteDatabase, path: Path, *, version: int = VERSION) -> None:
    """Raise StoreError if a file opened for reading is not a store of this version."""
    current = _read_version(connection, path, version)
    if current == 0:
        raise StoreError(f"{path} is empty: no run has written to it")
    if current < version:
        raise StoreError(
            f"{path} has schema version {current}, this Instar reads {version}: open it for writing to "
            "migrate it, with `instar serve` or `instar train --resume`"
        )
    _check_tables(connection, path)


def _read_version(connection: SqliteDatabase, path: Path, version: int) -> int:
    """Return the file's schema version, or 0 if the file is empty. Raise StoreError if it is not a store or
    is newer."""
    current = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application_id = int(connection.execute("PRAGMA application_id").fetchone()[0])
    is_empty = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
    if application_id == 0 and current == 0 and is_empty:
        return 0
    if application_id != APPLICATION_ID:
        raise StoreError(
            f"{path} is an SQLite file of another program: set store.path to another file. "
            "Nothing was changed"
        )
    if current > version:
        raise StoreNewer(
            f"{path} was written by a newer Instar (schema version {current}, this one reads up to "
            f"{version}): upgrade Instar, or set store.path to another file. Nothing was changed"
        )
    return current


def _enable_wal(connection: SqliteDatabase, path: Path) -> None:
    """Switch the file to write-ahead logging. SQLite ignores the busy timeout here, so Python waits for the
    lock."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            mode = str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            break
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    if mode != "wal":
        raise StoreError(
            f"{path}: the file system does not support a write-ahead log (SQLite chose {mode!r}); "
            "put store.path on a local disk"
        )


def _create(connection: SqliteDatabase) -> None:
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for statement in (*(table.create_sql for table in TABLES), *INDEXES, *TRIGGERS):
        connection.execute(statement)


def _check_tables(connection: SqliteDatabase, path: Path) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := sorted({table.name for table in TABLES} - tables):
        raise corrupt_file_error(path, f"the table {missing[0]} is missing")
