"""The interface between the store's SQL and a database connection.

A query is written once, in the SQL that SQLite and PostgreSQL share, with parameters as ``?`` or ``:name``.
Where the two differ, the query takes the SQL from its `Database`.

Several processes may run transactions concurrently, so a write that reads something and then changes it must
lock it first: existing rows with `for_update`, anything else by a name with `lock_name`. SQLite allows only
one writer at a time and needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from instar.errors import StoreError
from instar.store.table import Table

Values = Sequence[Any] | Mapping[str, Any]


class Cursor(Protocol):
    """The result of a statement. Values in its rows are accessed by column name."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


@contextmanager
def translate_errors(
    errors: type[Exception], translate: Callable[[Exception], StoreError]
) -> Generator[None]:
    """Translate the errors of a driver while a connection is opened."""
    try:
        yield
    except errors as error:
        raise translate(error) from error


class Database(Protocol):
    """A database connection, used by one thread at a time."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """The exceptions that the driver raises."""
    for_update: ClassVar[str]
    """A suffix that makes a SELECT lock its rows until the transaction ends. Empty if no lock is needed."""
    for_delete: ClassVar[str]
    """Like `for_update`, for rows that will be deleted. It also waits for writes of rows that refer to
    them."""
    json_rows_sql: ClassVar[str]
    """An aggregate that returns all rows as one JSON array of arrays. ``{}`` stands for the columns."""
    json_array_sql: ClassVar[str]
    """A query that expands a JSON array of strings into rows. ``{}`` stands for the array."""

    def execute(self, sql: str, values: Values = (), /) -> Cursor: ...

    def insert(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows whose values are in the order of `Table.insert_columns`."""

    def insert_autocommit(self, table: Table, rows: Sequence[Sequence[Any]]) -> bool:
        """Insert the rows in one autocommitted statement. Return False if this is not possible."""
        ...

    def lock_name(self, name: str) -> None:
        """Lock the name until the transaction ends."""

    # For readers.

    def begin_read(self) -> None:
        """Begin a transaction that reads one snapshot."""

    def is_connection_lost(self, error: Exception) -> bool:
        """Return True if the connection is lost and the read should be repeated on a new one."""
        ...

    # For the writer. SAVEPOINT and RELEASE are the same in all databases.

    def begin(self) -> None:
        """Begin a write transaction. If the database is locked or unavailable, wait up to a timeout."""

    def commit(self) -> None:
        """Commit to disk. Raises one of `errors` if the commit fails, or StoreError if the server rolls back
        without an error or the outcome is unknown."""

    def rollback(self) -> None:
        """Roll back the transaction if there is one. A lost connection is not an error."""

    def rollback_savepoint(self) -> None:
        """Undo the changes since the savepoint ``job``."""

    def on_batch_finished(self) -> None:
        """Called after each batch of writes is committed or rolled back, before its callers are notified."""

    def is_rolled_back(self, error: Exception) -> bool:
        """Return True if the error ended the entire transaction, not just the statement."""
        ...

    def is_global_failure(self, error: Exception) -> bool:
        """Return True if any other write would fail too: the database is locked or cannot be reached."""
        ...

    def is_transient(self, error: Exception) -> bool:
        """Return True if the transaction was not committed and can be retried."""
        ...

    def translate(self, error: Exception) -> StoreError: ...

    def close(self) -> None: ...
