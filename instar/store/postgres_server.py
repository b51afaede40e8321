"""Connections to a PostgreSQL server, and its errors in the store's words."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg.types.numeric import Int8BinaryDumper

from instar.errors import ConflictError, StoreCorrupt, StoreError, StoreFull

logger = logging.getLogger(__name__)
T = TypeVar("T")

OLDEST = 13
GRACE = 1.25
"""Times the deadline of a statement, after which a server that says nothing is given up."""

# An answer that waiting cannot change. The server's words, for libpq gives no code for a refused connection;
# in another language they are waited for in vain.
_HOPELESS = re.compile(
    r"authentication failed|no password supplied|does not exist|no pg_hba.conf entry|permission denied"
    r"|unsupported frontend protocol|does not support SSL|certificate"
)
_LOST = ("08000", "08001", "08003", "08004", "08006", "57P01", "57P02", "57P03", "57P05", "25P03")
_PASSING = ("40001", "40P01")
_NO_ROOM = ("53000", "53100", "53200", "53400")
_DAMAGED = ("XX001", "XX002", "42P01", "42703")


class ServerTimeout(psycopg.OperationalError):
    pass


class NotCommitted(psycopg.OperationalError):
    """The connection was lost, and the server says that the transaction went with it."""


class PostgresConnection(psycopg.Connection[DictRow]):
    """Its server answers within ``patience`` seconds, or the connection is given up."""

    response_timeout = 30.0 * GRACE

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        try:
            return super().wait(_answered(gen, time.monotonic() + self.response_timeout), interval, timeout)
        except ServerTimeout:
            self.close()
            raise


def _answered(gen: PQGen[T], deadline: float) -> PQGen[T]:
    """psycopg's way of waiting, which asks each time whether there is something to read, with an end."""
    steps = cast(Generator[Any, Any, T], gen)
    try:
        asks = next(steps)
        while True:
            ready = yield asks
            if not ready and time.monotonic() > deadline:
                raise ServerTimeout("the server does not answer")
            asks = steps.send(ready)
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class PostgresServer:
    """Where the store is, and how to get there."""

    url: str
    schema: str
    timeout: float
    password: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.url} (schema {self.schema})"

    def connect(
        self, label: str, *, read_only: bool = False, retry_timeout: float | None = None
    ) -> PostgresConnection:
        """In autocommit mode. Tried again until ``patience``, by default the timeout, is over; then raises
        psycopg's error."""
        deadline = time.monotonic() + (self.timeout if retry_timeout is None else retry_timeout)
        pause, told = 0.05, False
        while True:
            try:
                return self._connect(label, read_only)
            except psycopg.OperationalError as error:
                if _HOPELESS.search(str(error)) or time.monotonic() + pause > deadline:
                    raise
                if not told:
                    logger.warning("%s cannot be reached, trying again: %s", self.name, error_text(error))
                    told = True
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _connect(self, label: str, read_only: bool) -> PostgresConnection:
        settings: dict[str, Any] = {
            "connect_timeout": max(2, round(self.timeout / 2)),
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": round(self.timeout * 1000),
            **conninfo_to_dict(self.url),
            "application_name": label,
            "client_encoding": "utf8",
        }
        if self.password is not None:
            settings["password"] = self.password
        connection = PostgresConnection.connect(
            make_conninfo("", **settings), autocommit=True, row_factory=dict_row
        )
        try:
            connection.response_timeout = self.timeout * GRACE
            # One type for all numbers, so that a statement is prepared once.
            connection.adapters.register_dumper(int, Int8BinaryDumper)
            self._set_up(connection, read_only)
        except BaseException:  # any failure: close the connection, then re-raise
            connection.close()
            raise
        return connection

    def _set_up(self, connection: PostgresConnection, read_only: bool) -> None:
        """A commit waits for the disk also where the server's own setting is not to; a host that vanishes
        holds no lock for long."""
        milliseconds = str(round(self.timeout * 1000))
        connection.execute(
            """
            SELECT set_config('search_path', %(path)s, false),
              set_config('statement_timeout', %(timeout)s, false),
              set_config('idle_in_transaction_session_timeout', %(timeout)s, false),
              set_config('default_transaction_read_only', %(read_only)s, false),
              set_config('synchronous_commit', CASE current_setting('synchronous_commit')
                WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)""",
            {
                "path": f'"{self.schema}"',
                "timeout": milliseconds,
                "read_only": "on" if read_only else "off",
            },
        )

    # --- its errors -----------------------------------------------------------------------------

    def translate(self, error: Exception) -> StoreError:
        """What a caller of the store is told, for anything that PostgreSQL refused."""
        code, text = _code(error), error_text(error)
        if code == "23505":
            return ConflictError(f"there already: {text}")
        if code.startswith(("22", "23")) or isinstance(error, psycopg.DataError):
            return StoreError(f"the store refuses the row: {text}")
        if code in _NO_ROOM:
            return StoreFull(
                f"no room to write to {self.name} ({text}): make room on the server's disk. What was "
                "acknowledged is stored; what failed was not written at all"
            )
        if code in _DAMAGED:
            return self.corrupt(text)
        if code == "57014":
            return StoreError(
                f"{self.name} took longer than store.timeout, {self.timeout:g} s ({text}): look for a "
                "session that holds a lock and is stuck (pg_stat_activity)"
            )
        if code == "42501":
            return StoreError(f"{self.name}: {text}: its user needs to own the schema, or may make one")
        if code == "25006":
            return StoreError(
                f"{self.name} takes no writes ({text}): it is a standby; name the primary in store.url"
            )
        if isinstance(error, psycopg.OperationalError):
            return StoreError(f"{self.name} cannot be reached: {text}. {_advice(text)}")
        return StoreError(f"{self.name}: {text}")

    def corrupt(self, detail: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"{self.name} is damaged, or no store at all ({detail}): restore it from a backup, or name "
            "another schema in store.db_schema"
        )


def _advice(text: str) -> str:
    if "password" in text:
        return "The password is read from the variable that store.password_env names, or from ~/.pgpass"
    if "does not exist" in text:
        return "Make it on the server: createdb, createuser"
    return "Check store.url, and that the server is up"


def _code(error: Exception) -> str:
    return (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""


def error_text(error: Exception) -> str:
    """The server's message and its detail, in a line."""
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        detail = error.diag.message_detail
        return error.diag.message_primary + (f" ({detail})" if detail else "")
    return " ".join(str(error).split())


def is_connection_lost(error: Exception) -> bool:
    return isinstance(error, NotCommitted) or _code(error) in _LOST


def is_transient(error: Exception) -> bool:
    """Two transactions in each other's way, of which this one was undone."""
    return _code(error) in _PASSING
