"""The embedded store: one SQLite file, shared by all processes of a run.

The file uses a write-ahead log with ``synchronous=FULL``, so that a write is on disk when it returns. Each
process has one writer, which groups concurrent writes into one commit, and readers that never wait for it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path
from typing import Self

from instar.config import RunConfig
from instar.errors import StoreError
from instar.store import migrations
from instar.store.base import Store
from instar.store.database import translate_errors
from instar.store.reader import ReaderPool
from instar.store.sqlite_database import (
    SqliteDatabase,
    connect,
    erase_deleted,
    get_counter_path,
    translate_error,
)
from instar.store.writer import Writer

READER_THREADS = 4


class SqliteStore(Store):
    """A store in a SQLite file. Unless ``read_only``, the file is created or migrated first."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        if read_only:
            _check_readable(path)
        writer = None if read_only else Writer(_open_for_writing(path), str(path))
        super().__init__(
            str(path), writer, ReaderPool(lambda: _open_for_reading(path), str(path), threads=READER_THREADS)
        )

    async def erase_deleted(self, *, rewrite: bool) -> bool:
        def erase() -> bool:
            with _translate_errors(self.path):
                return erase_deleted(self.path, rewrite=rewrite)

        return await asyncio.to_thread(erase)

    @classmethod
    def from_config(cls, config: RunConfig, *, read_only: bool = False) -> Self:
        return cls(config.store_path, read_only=read_only)


def _translate_errors(path: Path) -> AbstractContextManager[None]:
    return translate_errors(sqlite3.Error, lambda error: translate_error(error, path))


def _open_for_writing(path: Path) -> SqliteDatabase:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)  # only the owner may read recorded conversations
            get_counter_path(path).unlink(missing_ok=True)  # left over from a deleted store
    except OSError as error:
        raise StoreError(f"cannot create {path}: {error}") from error
    with _translate_errors(path), ExitStack() as on_failure:
        connection = connect(path)
        on_failure.callback(connection.close)
        migrations.create_or_migrate(connection, path)
        connection.wait_in_begin()
        connection.start_call_counter()
        on_failure.pop_all()
        return connection


def _open_for_reading(path: Path) -> SqliteDatabase:
    with _translate_errors(path):
        return connect(path, read_only=True)


def _check_readable(path: Path) -> None:
    if not path.is_file():
        raise StoreError(f"no store found at {path}; check the path, or start the run")
    with _translate_errors(path), closing(connect(path, read_only=True)) as connection:
        migrations.check_version(connection, path)
