"""Creates a store file from `schema`, or migrates an older file to the current version.

``MIGRATIONS[n]`` migrates a file from version n to version n + 1. New columns, tables and indexes are taken
from the schema modules, so never edit the declaration of a column, table or index that was released. The
migrations are tested on a file of every released version in tests/unit/store/fixtures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from instar.errors import StoreError, StoreOutdated, StoreTooNew
from instar.store.schema import APPLICATION_ID, TABLES, VERSION
from instar.store.schema_indexes import INDEXES, INDEXES_BY_VERSION, TRIGGERS
from instar.store.sqlite_database import SqliteDatabase, corrupt_file_error, retry_while_busy


def _build_migration(version: int, *statements: str, first: Sequence[str] = ()) -> tuple[str, ...]:
    """Return SQL that runs ``first``, adds this version's columns and tables, runs ``statements``, and adds
    its indexes."""
    changes = [statement for table in TABLES for statement in table.build_migration_sql(version)]
    return (*first, *changes, *statements, *INDEXES_BY_VERSION.get(version, ()))


MIGRATIONS: Mapping[int, Sequence[str]] = {
    1: _build_migration(
        2,
        "UPDATE groups SET claimed_epoch = COALESCE((SELECT MAX(epoch) FROM claims "
        "WHERE claims.group_id = groups.group_id AND claims.run_id = groups.run_id), -1)",
        "DROP INDEX IF EXISTS calls_by_session",
    ),
    2: _build_migration(3),
    3: _build_migration(
        4,
        "UPDATE sessions SET reward = (SELECT value FROM rewards "
        "WHERE rewards.session_id = sessions.session_id AND call_id IS NULL ORDER BY seq DESC LIMIT 1)",
        "DROP INDEX IF EXISTS sessions_by_run",
    ),
    4: _build_migration(
        5,
        # The answer of a judge ended with the id of its session, which has 25 characters.
        "UPDATE judgments SET session_id = substr(answer, length(answer) - 26, 25) "
        'WHERE substr(answer, length(answer) - 37, 11) = \'"session":"\'',
        # Until now, users were only recorded if their id was also the agent's id of the session.
        *(
            "INSERT INTO session_users (session_id, user_id, run_id) "
            f"SELECT session_id, substr(external_id, {len(prefix) + 1}), run_id FROM sessions "
            f"WHERE substr(external_id, 1, {len(prefix)}) = '{prefix}'"
            for prefix in ("user:", "user_id:", "safety_identifier:")
        ),
    ),
    5: _build_migration(
        6,
        # Until now, a run had one policy, with the same name.
        "UPDATE steps SET run_id = policy_id",
        "UPDATE claims SET run_id = policy_id",
        *(f"DROP INDEX IF EXISTS {name}" for name in ("claims_by_step", "claims_by_group", "steps_by_state")),
        first=[f"ALTER TABLE {table} RENAME COLUMN run_id TO policy_id" for table in ("steps", "claims")],
    ),
    6: _build_migration(7),
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

    Raises StoreError and changes nothing if another program or a newer version of Instar wrote the file.
    """
    _read_version(connection, path, version)
    _enable_wal(connection, path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        current = _read_version(connection, path, version)
        if current == 0:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statement in (*(table.create_sql for table in TABLES), *INDEXES, *TRIGGERS):
                connection.execute(statement)
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
    """Raise StoreError unless the file contains a store of this version."""
    current = _read_version(connection, path, version)
    if current == 0:
        raise StoreError(f"{path} is empty; check the path, or start the run")
    require_migrated(str(path), current, version)
    _check_tables(connection, path)


def require_migrated(name: str, current: int, version: int) -> None:
    if current < version:
        raise StoreOutdated(
            f"{name} has schema version {current}, but this version of Instar requires {version}; migrate "
            "the store by opening it for writing, with `instar serve` or `instar train --resume`"
        )


def require_not_newer(name: str, current: int, version: int, setting: str) -> None:
    """Raise StoreTooNew if ``current`` is newer than ``version``; ``setting`` is the config key to change."""
    if current > version:
        raise StoreTooNew(
            f"{name} was written by a newer version of Instar: it has schema version {current}, and this "
            f"version reads up to {version}; upgrade Instar, or change {setting}. The store was not changed"
        )


def _read_version(connection: SqliteDatabase, path: Path, version: int) -> int:
    """Return the file's schema version, or 0 if the file is empty. Raise StoreError if the file is not a
    store, or was written by a newer version of Instar."""
    # Read this first: if another process then creates the store, the next statements read its version.
    is_empty = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
    current = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application_id = int(connection.execute("PRAGMA application_id").fetchone()[0])
    if application_id == 0 and current == 0 and is_empty:
        return 0
    if application_id != APPLICATION_ID:
        raise StoreError(
            f"{path} is another program's SQLite file; set store.path to a different file. The file was "
            "not changed"
        )
    require_not_newer(str(path), current, version, "store.path")
    return current


def _enable_wal(connection: SqliteDatabase, path: Path) -> None:
    """Switch the file to write-ahead logging. SQLite ignores the busy timeout for this statement."""
    cursor = retry_while_busy(lambda: connection.execute("PRAGMA journal_mode = WAL"))
    mode = str(cursor.fetchone()[0])
    if mode != "wal":
        raise StoreError(
            f"{path}: the file system does not support a write-ahead log (SQLite chose {mode!r}); "
            "put store.path on a local disk"
        )


def _check_tables(connection: SqliteDatabase, path: Path) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := sorted({table.name for table in TABLES} - tables):
        raise corrupt_file_error(path, f"the table {missing[0]} is missing")
