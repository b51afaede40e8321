"""The store's tables in a PostgreSQL schema: made from `schema`, or migrated, by one process at a time.

The declarations and migrations are those of SQLite, in PostgreSQL's words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from instar.errors import StoreError, StoreNewer
from instar.store.migrations import MIGRATIONS
from instar.store.postgres_server import GRACE, OLDEST, PostgresConnection, PostgresServer
from instar.store.schema import GROUP_COUNTS, INTEGER, REAL, SESSION_COUNTS, TABLES, VERSION, Table
from instar.store.schema_indexes import INDEXES

MARK = "instar_store"
"""The table that says that the schema is ours, and its version."""
MIGRATION_TIMEOUT = 3600.0

WRITERS = Table("writers", {"writer": "TEXT PRIMARY KEY", "number": INTEGER, "at": REAL})
"""The last transaction of each process that writes; see `postgres_connection`."""

_WORDS = {
    "INTEGER PRIMARY KEY": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "TEXT": 'TEXT COLLATE "C"',
    "BLOB": "BYTEA",
    "x''": "''",
}
_WORD = re.compile("|".join(rf"\b{word}" for word in _WORDS))
_PLAIN_INDEX = re.compile(r"^CREATE INDEX (\w+) ON (\w+) \(([^)]*)\)")


def to_postgres_ddl(ddl: str) -> str:
    """A statement that makes or changes tables, from SQLite's words."""
    return _WORD.sub(lambda found: _WORDS[found[0]], _with_order(ddl))


def _with_order(ddl: str) -> str:
    """An index of SQLite ends with the row number, by which the newest of its rows is found."""
    found = _PLAIN_INDEX.match(ddl)
    if found is None or not any(table.name == found[2] and "seq" in table.columns for table in TABLES):
        return ddl
    if "seq" in found[3].split(", "):
        return ddl
    return f"CREATE INDEX {found[1]} ON {found[2]} ({found[3]}, seq)" + ddl[found.end() :]


def create_or_migrate(
    connection: PostgresConnection,
    server: PostgresServer,
    *,
    version: int = VERSION,
    migrations: Mapping[int, Sequence[str]] = MIGRATIONS,
) -> None:
    """Make the schema a store of ``version``, in one transaction. Several processes may do so at once.

    What is not ours, or newer than we are, is left exactly as it was."""
    _check_server(connection, server)
    if _found_version(connection, server, version) != version:
        connection.response_timeout = MIGRATION_TIMEOUT
        with connection.transaction():
            connection.execute("SET LOCAL statement_timeout = 0")
            connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"{server.schema} {MARK}",)
            )
            _bring_to(connection, server, version, migrations)
        connection.response_timeout = server.timeout * GRACE
    _check_tables(connection, server)


def check_version(connection: PostgresConnection, server: PostgresServer, *, version: int = VERSION) -> None:
    """That a schema opened for reading only is a store of this version."""
    _check_server(connection, server)
    found = _found_version(connection, server, version)
    if found == 0:
        raise StoreError(f"there is no store in {server.name}: no run has written to it")
    if found < version:
        raise StoreError(
            f"{server.name} has schema version {found}, this Instar reads {version}: it is brought up to "
            "date when opened for writing, by `instar serve` or `instar train --resume`"
        )
    _check_tables(connection, server)


def _bring_to(
    connection: PostgresConnection,
    server: PostgresServer,
    version: int,
    migrations: Mapping[int, Sequence[str]],
) -> None:
    found = _found_version(connection, server, version)
    if found == 0:
        _create(connection, server)
        found = VERSION
    for number in range(found, version):
        for statement in migrations[number]:
            connection.execute(to_postgres_ddl(statement).encode())
    connection.execute(f"UPDATE {MARK} SET version = %s".encode(), (version,))


def _check_server(connection: PostgresConnection, server: PostgresServer) -> None:
    if connection.info.server_version < OLDEST * 10_000:
        found = connection.info.server_version // 10_000
        raise StoreError(f"{server.name} is PostgreSQL {found}: the store needs {OLDEST} or later")
    if (encoding := connection.info.parameter_status("server_encoding")) != "UTF8":
        raise StoreError(f"{server.name} has the encoding {encoding}: make a database with UTF8")


def _found_version(connection: PostgresConnection, server: PostgresServer, version: int) -> int:
    """0 when the schema is empty or not there. Refuses what is not ours or is newer."""
    there = _tables(connection, server)
    if not there:
        return 0
    if MARK not in there:
        raise StoreError(
            f"{server.name} holds tables of another program: name another schema in store.db_schema. "
            "It was left as it is"
        )
    row = connection.execute(f"SELECT version FROM {MARK}".encode()).fetchone()
    found = 0 if row is None else int(row["version"])
    if found > version:
        raise StoreNewer(
            f"{server.name} was written by a newer Instar (schema version {found}, this one knows up to "
            f"{version}): upgrade Instar, or name another schema in store.db_schema. It was left as it is"
        )
    return found


def _tables(connection: PostgresConnection, server: PostgresServer) -> set[str]:
    rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (server.schema,))
    return {row["tablename"] for row in rows}


def _check_tables(connection: PostgresConnection, server: PostgresServer) -> None:
    wanted = {table.name for table in (*TABLES, WRITERS)}
    if missing := sorted(wanted - _tables(connection, server)):
        raise server.corrupt(f"without its table {missing[0]}")


# --- making it ----------------------------------------------------------------------------------


def _create(connection: PostgresConnection, server: PostgresServer) -> None:
    exists = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (server.schema,)).fetchone()
    if exists is None:
        connection.execute(f'CREATE SCHEMA "{server.schema}"'.encode())
    for statement in _statements():
        connection.execute(statement.encode())


def _statements() -> list[str]:
    counted = {table.name: _by_backend(table) for table in (GROUP_COUNTS, SESSION_COUNTS)}
    tables = [counted.get(table.name, table) for table in TABLES]
    return [
        *(to_postgres_ddl(table.create) for table in (*tables, WRITERS)),
        f"CREATE TABLE {MARK} (version BIGINT NOT NULL)",
        f"INSERT INTO {MARK} (version) VALUES ({VERSION})",
        *(to_postgres_ddl(index) for index in INDEXES),
        *_counting("groups", "group_counts", ("run_id", "channel", "status", "consumed")),
        *_counting("sessions", "session_counts", ("run_id", "channel", "status")),
    ]


def _by_backend(counts: Table) -> Table:
    """Each server process counts for itself, and what is read is the sum: one row for all would have the
    writers wait for each other, two such rows have them wait forever."""
    (key,) = counts.constraints
    return replace(
        counts, columns={**counts.columns, "backend": INTEGER}, constraints=(f"{key[:-1]}, backend)",)
    )


def _counting(table: str, counts: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    columns = ", ".join(keys)

    def count(row: str, by: int) -> str:
        values = ", ".join(f"{row}.{key}" for key in keys)
        return (
            f"INSERT INTO {counts} ({columns}, backend, n) VALUES ({values}, pg_backend_pid(), {by}) "
            f"ON CONFLICT ({columns}, backend) DO UPDATE SET n = {counts}.n + {by};"
        )

    changed = " OR ".join(f"OLD.{key} IS DISTINCT FROM NEW.{key}" for key in keys)
    return (
        f"CREATE FUNCTION {table}_counted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF TG_OP = 'UPDATE' THEN {count('OLD', -1)} END IF; {count('NEW', 1)} RETURN NULL; END $$",
        f"CREATE TRIGGER {table}_counted AFTER INSERT ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION {table}_counted()",
        f"CREATE TRIGGER {table}_recounted AFTER UPDATE ON {table} "
        f"FOR EACH ROW WHEN ({changed}) EXECUTE FUNCTION {table}_counted()",
    )
