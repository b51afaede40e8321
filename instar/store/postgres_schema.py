"""Creates or migrates the store's tables in a PostgreSQL schema, in one process at a time.

The declarations and migrations are those for SQLite, translated to PostgreSQL types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from instar.errors import StoreError
from instar.store.migrations import MIGRATIONS, require_migrated, require_not_newer
from instar.store.postgres_server import (
    MIN_SERVER_VERSION,
    RESPONSE_TIMEOUT_FACTOR,
    PostgresConnection,
    PostgresServer,
)
from instar.store.schema import GROUP_COUNTS, SESSION_COUNTS, TABLES, VERSION
from instar.store.schema_indexes import INDEXES
from instar.store.table import INTEGER, REAL, Table

VERSION_TABLE = "instar_store"
"""The table that marks the schema as a store and contains the store's version."""
MIGRATION_TIMEOUT_SECONDS = 3600.0

WRITERS = Table("writers", {"writer": "TEXT PRIMARY KEY", "number": INTEGER, "at": REAL})
"""A row per writing process with the number of its last transaction; see `postgres_database`."""

_POSTGRES_TYPES = {
    "INTEGER PRIMARY KEY": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "TEXT": 'TEXT COLLATE "C"',
    "BLOB": "BYTEA",
    "x''": "''",
}
_SQLITE_TYPE = re.compile("|".join(rf"\b{word}" for word in _POSTGRES_TYPES))
_PLAIN_INDEX = re.compile(r"^CREATE INDEX (\w+) ON (\w+) \(([^)]*)\)")


def to_postgres_ddl(ddl: str) -> str:
    return _SQLITE_TYPE.sub(lambda match: _POSTGRES_TYPES[match[0]], _append_seq_column(ddl))


def _append_seq_column(ddl: str) -> str:
    """Append `seq` to the columns of an index, if its table has `seq`. SQLite indexes end with the rowid
    implicitly, and queries for the newest row rely on it."""
    match = _PLAIN_INDEX.match(ddl)
    if match is None or not any(table.name == match[2] and "seq" in table.columns for table in TABLES):
        return ddl
    if "seq" in match[3].split(", "):
        return ddl
    return f"CREATE INDEX {match[1]} ON {match[2]} ({match[3]}, seq)" + ddl[match.end() :]


def create_or_migrate(
    connection: PostgresConnection,
    server: PostgresServer,
    *,
    version: int = VERSION,
    migrations: Mapping[int, Sequence[str]] = MIGRATIONS,
) -> None:
    """Create the store in the schema or migrate it to ``version``, in one transaction. Several processes may
    call this at the same time.

    Raises StoreError and changes nothing if another program or a newer version of Instar wrote the schema.
    """
    _check_server(connection, server)
    if _read_version(connection, server, version) != version:
        connection.response_timeout = MIGRATION_TIMEOUT_SECONDS
        with connection.transaction():
            connection.execute("SET LOCAL statement_timeout = 0")
            connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"{server.schema} {VERSION_TABLE}",)
            )
            _create_or_migrate(connection, server, version, migrations)
        connection.response_timeout = server.timeout * RESPONSE_TIMEOUT_FACTOR
    _check_tables(connection, server)


def check_version(connection: PostgresConnection, server: PostgresServer, *, version: int = VERSION) -> None:
    """Raise StoreError unless the schema contains a store of this version."""
    _check_server(connection, server)
    current = _read_version(connection, server, version)
    if current == 0:
        raise StoreError(
            f"no store found in {server.name}; check store.url and store.db_schema, or start the run"
        )
    require_migrated(server.name, current, version)
    _check_tables(connection, server)


def _create_or_migrate(
    connection: PostgresConnection,
    server: PostgresServer,
    version: int,
    migrations: Mapping[int, Sequence[str]],
) -> None:
    current = _read_version(connection, server, version)
    if current == 0:
        exists = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (server.schema,))
        if exists.fetchone() is None:
            connection.execute(f'CREATE SCHEMA "{server.schema}"'.encode())
        for statement in _build_create_statements():
            connection.execute(statement.encode())
        current = VERSION
    for number in range(current, version):
        for statement in migrations[number]:
            connection.execute(to_postgres_ddl(statement).encode())
    connection.execute(f"UPDATE {VERSION_TABLE} SET version = %s".encode(), (version,))


def _check_server(connection: PostgresConnection, server: PostgresServer) -> None:
    if connection.info.server_version < MIN_SERVER_VERSION * 10_000:
        major = connection.info.server_version // 10_000
        raise StoreError(
            f"{server.name} runs PostgreSQL {major}; the store requires {MIN_SERVER_VERSION} or later"
        )
    if (encoding := connection.info.parameter_status("server_encoding")) != "UTF8":
        raise StoreError(
            f"{server.name} has the encoding {encoding}; create a database with the encoding UTF8"
        )


def _read_version(connection: PostgresConnection, server: PostgresServer, version: int) -> int:
    """Return the version of the store, or 0 if the schema is empty or missing. Raise StoreError if the schema
    is not a store, or was written by a newer version of Instar."""
    tables = _read_table_names(connection, server)
    if not tables:
        return 0
    if VERSION_TABLE not in tables:
        raise StoreError(
            f"{server.name} contains another program's tables; set store.db_schema to a different schema. "
            "The schema was not changed"
        )
    row = connection.execute(f"SELECT version FROM {VERSION_TABLE}".encode()).fetchone()
    current = 0 if row is None else int(row["version"])
    require_not_newer(server.name, current, version, "store.db_schema")
    return current


def _read_table_names(connection: PostgresConnection, server: PostgresServer) -> set[str]:
    rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (server.schema,))
    return {row["tablename"] for row in rows}


def _check_tables(connection: PostgresConnection, server: PostgresServer) -> None:
    expected = {table.name for table in (*TABLES, WRITERS)}
    if missing := sorted(expected - _read_table_names(connection, server)):
        raise server.corrupt_error(f"the table {missing[0]} is missing")


# --- creation -----------------------------------------------------------------------------------


def _build_create_statements() -> list[str]:
    count_tables = {table.name: _add_backend_column(table) for table in (GROUP_COUNTS, SESSION_COUNTS)}
    tables = [count_tables.get(table.name, table) for table in TABLES]
    return [
        *(to_postgres_ddl(table.create_sql) for table in (*tables, WRITERS)),
        f"CREATE TABLE {VERSION_TABLE} (version BIGINT NOT NULL)",
        f"INSERT INTO {VERSION_TABLE} (version) VALUES ({VERSION})",
        *(to_postgres_ddl(index) for index in INDEXES),
        *_build_counting_triggers("groups", "group_counts", ("run_id", "channel", "status", "consumed")),
        *_build_counting_triggers("sessions", "session_counts", ("run_id", "channel", "status")),
    ]


def _add_backend_column(counts: Table) -> Table:
    """Give each server process its own counter rows, which readers add up.

    Writers that share a counter row would wait for each other, and writers that share two could deadlock.
    """
    (key,) = counts.constraints
    return replace(
        counts, columns={**counts.columns, "backend": INTEGER}, constraints=(f"{key[:-1]}, backend)",)
    )


def _build_counting_triggers(table: str, counts: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    columns = ", ".join(keys)

    def build_count_sql(row: str, change: int) -> str:
        values = ", ".join(f"{row}.{key}" for key in keys)
        return (
            f"INSERT INTO {counts} ({columns}, backend, n) VALUES ({values}, pg_backend_pid(), {change}) "
            f"ON CONFLICT ({columns}, backend) DO UPDATE SET n = {counts}.n + {change};"
        )

    changed = " OR ".join(f"OLD.{key} IS DISTINCT FROM NEW.{key}" for key in keys)
    return (
        f"CREATE FUNCTION {table}_counted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF TG_OP = 'UPDATE' THEN {build_count_sql('OLD', -1)} END IF; {build_count_sql('NEW', 1)} "
        "RETURN NULL; END $$",
        f"CREATE TRIGGER {table}_counted AFTER INSERT ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {table}_counted()",
        f"CREATE TRIGGER {table}_recounted AFTER UPDATE ON {table} "
        f"FOR EACH ROW WHEN ({changed}) EXECUTE FUNCTION {table}_counted()",
    )
