"""Connects to a PostgreSQL server and translates its errors."""

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

from instar.errors import ConflictError, StoreCorrupt, StoreError, StoreFull, StoreUnavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")

MIN_SERVER_VERSION = 13
RESPONSE_TIMEOUT_FACTOR = 1.25
"""A connection is considered lost if the server does not respond within the store's timeout times this."""

# Failures that a retry cannot fix. They are recognized by the server's message, because libpq gives no code
# for a failed connection attempt. If the message is in another language, they are retried until the timeout.
_PERMANENT_FAILURE = re.compile(
    r"authentication failed|no password supplied|does not exist|no pg_hba.conf entry|permission denied"
    r"|unsupported frontend protocol|does not support SSL|certificate"
)
_DISCONNECT_CODES = ("08000", "08001", "08003", "08004", "08006", "57P01", "57P02", "57P03", "57P05", "25P03")
_TRANSIENT_CODES = ("40001", "40P01")
_OUT_OF_RESOURCES_CODES = ("53000", "53100", "53200", "53400")
_CORRUPT_CODES = ("XX001", "XX002", "42P01", "42703")


class ServerTimeout(psycopg.OperationalError):
    pass


class TransactionNotCommitted(psycopg.OperationalError):
    """The connection was lost, and the server did not commit the transaction."""


class PostgresConnection(psycopg.Connection[DictRow]):
    """A connection that closes itself if the server does not respond within ``response_timeout`` seconds."""

    response_timeout = 30.0 * RESPONSE_TIMEOUT_FACTOR

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        try:
            return super().wait(_wait_until(gen, time.monotonic() + self.response_timeout), interval, timeout)
        except ServerTimeout:
            self.close()
            raise


def _wait_until(gen: PQGen[T], deadline: float) -> PQGen[T]:
    """Run psycopg's generator, which polls the socket. Raises ServerTimeout after the deadline."""
    steps = cast(Generator[Any, Any, T], gen)
    try:
        wait_for = next(steps)
        while True:
            ready = yield wait_for
            if not ready and time.monotonic() > deadline:
                raise ServerTimeout("the server does not respond")
            wait_for = steps.send(ready)
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class PostgresServer:
    """The address, schema and credentials of a store."""

    url: str
    schema: str
    timeout: float
    """Timeout in seconds for a statement, and for connecting. One attempt to connect may take half of it."""
    password: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.url} (schema {self.schema})"

    def connect(
        self, label: str, *, read_only: bool = False, retry_timeout: float | None = None
    ) -> PostgresConnection:
        """Return a new connection in autocommit mode, with ``label`` as its application name.

        Failures that a retry may fix are retried for ``retry_timeout`` seconds, by default the store's
        timeout, before psycopg's error is raised.
        """
        deadline = time.monotonic() + (self.timeout if retry_timeout is None else retry_timeout)
        pause, has_warned = 0.05, False
        while True:
            try:
                return self._connect(label, read_only)
            except psycopg.OperationalError as error:
                if _PERMANENT_FAILURE.search(str(error)) or time.monotonic() + pause > deadline:
                    raise
                if not has_warned:
                    logger.warning("cannot reach %s, retrying: %s", self.name, format_error(error))
                    has_warned = True
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
            connection.response_timeout = self.timeout * RESPONSE_TIMEOUT_FACTOR
            # Use one type for all integers, so that each statement is prepared only once.
            connection.adapters.register_dumper(int, Int8BinaryDumper)
            # Commits wait for the disk. If a client disappears, its locks are released after the timeout.
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
                    "timeout": str(round(self.timeout * 1000)),
                    "read_only": "on" if read_only else "off",
                },
            )
        except BaseException:  # any failure: close the connection, then re-raise
            connection.close()
            raise
        return connection

    def translate(self, error: Exception) -> StoreError:
        code, text = _get_sqlstate(error), format_error(error)
        if code == "23505":
            return ConflictError(f"the row already exists: {text}")
        if code.startswith(("22", "23")) or isinstance(error, psycopg.DataError):
            return StoreError(f"the database rejected the row: {text}")
        if code in _OUT_OF_RESOURCES_CODES:
            return StoreFull(
                f"{self.name} has no disk space or memory left ({text}): free some on the server. Earlier "
                "writes are stored; the failed write was rolled back"
            )
        if code in _CORRUPT_CODES:
            return self.corrupt_error(text)
        if code == "57014":
            return StoreUnavailable(
                f"a statement in {self.name} took longer than store.timeout ({self.timeout:g} s): {text}. "
                "Look in pg_stat_activity for a stuck session that holds a lock"
            )
        if code == "42501":
            return StoreError(
                f"{self.name}: {text}. The user must own the schema, or have permission to create it"
            )
        if code == "25006":
            return StoreError(
                f"{self.name} is a standby and rejects writes ({text}): set store.url to the primary"
            )
        if isinstance(error, psycopg.OperationalError):
            return StoreUnavailable(f"{self.name} cannot be reached: {text}. {_suggest_fix(text)}")
        return StoreError(f"{self.name}: {text}")

    def corrupt_error(self, detail: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"{self.name} is damaged or not a store ({detail}): restore it from a backup, or set "
            "store.db_schema to a different schema"
        )


def _suggest_fix(text: str) -> str:
    if "password" in text:
        return "Set the password in the variable named by store.password_env, in PGPASSWORD or in ~/.pgpass"
    if "does not exist" in text:
        return "Create the database with createdb, or the user with createuser"
    return "Check store.url, and that the server is running"


def _get_sqlstate(error: Exception) -> str:
    return (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""


def format_error(error: Exception) -> str:
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        detail = error.diag.message_detail
        return error.diag.message_primary + (f" ({detail})" if detail else "")
    return " ".join(str(error).split())


def is_connection_lost(error: Exception) -> bool:
    return isinstance(error, TransactionNotCommitted) or _get_sqlstate(error) in _DISCONNECT_CODES


def is_transient(error: Exception) -> bool:
    """Return True if the transaction was rolled back because of a deadlock or serialization failure."""
    return _get_sqlstate(error) in _TRANSIENT_CODES
