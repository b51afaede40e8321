"""A table of a store and its SQL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from instar.column_types import ColumnType, get_field_types


@dataclass(frozen=True)
class Table:
    name: str
    columns: Mapping[str, str]
    """SQL type and constraints by column name, in order."""
    constraints: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    """Columns that the database or a later statement fills in. They are omitted from INSERT statements."""
    added_in: int = 1
    """The schema version that added the table."""
    later_columns: Mapping[str, int] = field(default_factory=dict[str, int])
    """The schema version that added each column, by column name. Columns as old as the table are omitted."""

    @property
    def create_sql(self) -> str:
        lines = [f"{name} {declaration}" for name, declaration in self.columns.items()]
        return f"CREATE TABLE {self.name} (\n  " + ",\n  ".join([*lines, *self.constraints]) + "\n)"

    def build_migration_sql(self, version: int) -> list[str]:
        """Return the statements that update the table from the preceding schema version to ``version``."""
        if self.added_in == version:
            columns = {name: sql for name, sql in self.columns.items() if name not in self.later_columns}
            return [Table(self.name, columns, self.constraints).create_sql]
        added = [name for name, added_in in self.later_columns.items() if added_in == version]
        return [f"ALTER TABLE {self.name} ADD COLUMN {name} {self.columns[name]}" for name in added]

    @cached_property
    def insert_columns(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name not in self.generated)

    @property
    def insert_sql(self) -> str:
        values = ", ".join(f":{name}" for name in self.insert_columns)
        return f"INSERT INTO {self.name} ({', '.join(self.insert_columns)}) VALUES ({values})"

    @property
    def insert_for_session_sql(self) -> str:
        """An INSERT that copies the run, agent and policy from the session, if the session exists."""
        inherited = ("session_id", "run_id", "agent_id", "policy_id")
        values = ", ".join(name if name in inherited else f":{name}" for name in self.insert_columns)
        return (
            f"INSERT INTO {self.name} ({', '.join(self.insert_columns)}) SELECT {values} "
            "FROM sessions WHERE session_id = :session_id"
        )

    def build_upsert_clause(self, *keys: str) -> str:
        """Return a clause that makes an INSERT replace an existing row with the same keys."""
        updates = ", ".join(f"{name} = excluded.{name}" for name in self.insert_columns if name not in keys)
        return f" ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {updates}"

    def build_insert_sql(self, count: int) -> str:
        return _build_insert_sql(self.name, self.insert_columns, count)

    def to_values(self, row: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(row[name] for name in self.insert_columns)


@cache
def _build_insert_sql(table: str, names: tuple[str, ...], count: int) -> str:
    row = f"({', '.join('?' for _ in names)})"
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES {', '.join([row] * count)}"


ROW_NUMBER = "INTEGER PRIMARY KEY"
"""The type of a row number. Row numbers give the order in which rows were inserted."""

# The types of columns that must not be null.
TEXT = "TEXT NOT NULL"
INTEGER = "INTEGER NOT NULL"
REAL = "REAL NOT NULL"
BLOB = "BLOB NOT NULL"
SESSION_ID = "TEXT NOT NULL REFERENCES sessions (session_id)"

_SQL_TYPES = {
    ColumnType.TEXT: "TEXT",
    ColumnType.INT: "INTEGER",
    ColumnType.REAL: "REAL",
    ColumnType.BOOL: "INTEGER",
    ColumnType.IDS: "BLOB",
    ColumnType.FLOATS: "BLOB",
    ColumnType.JSON: "TEXT",
    ColumnType.BYTES: "BLOB",
}


def build_columns(cls: type, *names: str) -> dict[str, str]:
    """Return the SQL types of the dataclass fields ``names``, by default of all fields."""
    types = get_field_types(cls)
    return {
        name: _SQL_TYPES[types[name].column] + ("" if types[name].is_optional else " NOT NULL")
        for name in names or types
    }
