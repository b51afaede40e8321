"""Bring a file to the schema's version: a fresh one is made from `schema`, an older one is migrated.

``MIGRATIONS[n]`` turns a file of version n into one of version n + 1. Once released, a migration is
never edited; tests/unit/store/fixtures keeps a file of every released version to run them on.
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
    """Make the file a store of ``version``, in one transaction. Several processes may do so at once.

    A file that is not ours, or newer than we are, is left exactly as it was.
    """
    _found_version(connection, path, version)
    _write_ahead(connection, path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = _found_version(connection, path, version)
        if found == 0:
            _create(connection)
            found = VERSION
        for number in range(found, version):
            for statement in migrations[number]:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    _check_tables(connection, path)


def check_version(connection: SqliteDatabase, path: Path, *, version: int = VERSION) -> None:
    """That a file opened for reading only is a store of this version."""
    found = _found_version(connection, path, version)
    if found == 0:
        raise StoreError(f"{path} is empty: no run has written to it")
    if found < version:
        raise StoreError(
            f"{path} has schema version {found}, this Instar reads {version}: it is brought up to date when "
            "opened for writing, by `instar serve` or `instar train --resume`"
        )
    _check_tables(connection, path)


def _found_version(connection: SqliteDatabase, path: Path, version: int) -> int:
    """The schema version of the file; 0 when it is empty. Refuses what is not ours or is newer."""
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    empty = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
    if application == 0 and found == 0 and empty:
        return 0
    if application != APPLICATION_ID:
        raise StoreError(
            f"{path} is an SQLite file of another program: name another file in store.path. "
            "It was left as it is"
        )
    if found > version:
        raise StoreNewer(
            f"{path} was written by a newer Instar (schema version {found}, this one knows up to {version}): "
            "upgrade Instar, or name another file in store.path. It was left as it is"
        )
    return found


def _write_ahead(connection: SqliteDatabase, path: Path) -> None:
    """Switch to WAL. SQLite does not wait for a lock here, whatever the busy timeout."""
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
            f"{path}: the file system offers no write-ahead log (SQLite chose {mode!r}); "
            "put store.path on a local disk"
        )


def _create(connection: SqliteDatabase) -> None:
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for statement in (*(table.create for table in TABLES), *INDEXES, *TRIGGERS):
        connection.execute(statement)


def _check_tables(connection: SqliteDatabase, path: Path) -> None:
    there = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := sorted({table.name for table in TABLES} - there):
        raise corrupt_file_error(path, f"without its table {missing[0]}")
