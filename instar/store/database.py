"""What the store's SQL is run on: a connection to one of the databases that it knows.

A query is written once, in the words that SQLite and PostgreSQL share, with parameters as ``?`` or
``:name``. Where they differ, it takes the words from its `Database`.

Every write runs in a transaction that others may run beside, so one that reads what it then changes
holds it first: rows by `for_update`, a name by `hold`. SQLite has one writer at a time and needs neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from instar.errors import StoreError
from instar.store.schema import Table

Values = Sequence[Any] | Mapping[str, Any]


class Cursor(Protocol):
    """What a statement gave; rows are read by column name."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """One connection; threads use it one at a time."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """What the driver raises."""
    for_update: ClassVar[str]
    """Ends a SELECT whose rows nobody else may change before this transaction ends."""
    json_rows: ClassVar[str]
    """Makes all rows one, a JSON array of arrays of the columns at ``{}``."""
    json_texts: ClassVar[str]
    """A query for the members of the JSON array of texts at ``{}``."""

    def execute(self, sql: str, values: Values = (), /) -> Cursor: ...

    def insert(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """The values of each row in the order of `Table.inserted`."""

    def insert_autocommit(self, table: Table, rows: Sequence[Sequence[Any]]) -> bool:
        """As a transaction of its own, in one statement. False, and nothing done, where that cannot be."""
        ...

    def lock_name(self, name: str) -> None:
        """Until the transaction ends, nobody else has the name."""

    # what readers do

    def begin_read(self) -> None:
        """A transaction that sees one snapshot."""

    def is_connection_lost(self, error: Exception) -> bool:
        """Whether the connection is gone, and what it was asked should be asked again on a new one."""
        ...

    # what the writer does; SAVEPOINT, RELEASE and ROLLBACK TO are the same everywhere

    def begin(self) -> None:
        """A transaction that writes. Waits for its turn, or for the server, until a deadline."""

    def commit(self) -> None:
        """It is on disk when this returns, and not at all when this raises one of `errors`. StoreError where
        that cannot be told."""

    def rollback(self) -> None:
        """Whatever state it is in. Never raises for a connection that is lost."""

    def is_rolled_back(self, error: Exception) -> bool:
        """Whether the error undid, or must undo, the whole transaction and not the statement alone."""
        ...

    def is_global_failure(self, error: Exception) -> bool:
        """Whether no write could have fared better: the database is locked, or out of reach."""
        ...

    def is_transient(self, error: Exception) -> bool:
        """Whether the same transaction, which was not committed, may be tried again."""
        ...

    def translate(self, error: Exception) -> StoreError:
        """What a caller of the store is told."""
        ...

    def close(self) -> None: ...
