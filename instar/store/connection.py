"""SQLite connections set up for the store, and SQLite's errors in the store's words."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from instar.errors import Conflict, StoreCorrupt, StoreError, StoreFull

BUSY_TIMEOUT = 30.0
"""Seconds to wait for another process's write."""

_UNIQUE = (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
# A quota or file-size limit, and a shared-memory file that cannot grow, show as I/O errors.
_NO_ROOM = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP)


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode that any thread may use, one at a time. The file must exist."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    if read_only and _is_archived(path):
        uri += "&immutable=1"
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
    )
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_archived(path: Path) -> bool:
    """Closed for good, in a folder where SQLite cannot put the log's index that it would ask for."""
    return not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's error code without its extension; 0 for an error of the Python module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    return primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def translate(error: sqlite3.Error, path: Path) -> StoreError:
    """What a caller of the store is told, for anything that SQLite refused."""
    code, primary = getattr(error, "sqlite_errorcode", 0), primary_code(error)
    if code in _UNIQUE:
        return Conflict(f"there already: {error}")
    if primary == sqlite3.SQLITE_CONSTRAINT:
        return StoreError(f"the store refuses the row: {error}")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return corrupt(path, str(error))
    if primary == sqlite3.SQLITE_FULL or code in _NO_ROOM:
        return StoreFull(
            f"no room to write to {path} ({error}): make room on its disk, or raise the quota or file-size "
            "limit. What was acknowledged is stored; what failed was not written at all"
        )
    if is_busy(error):
        return StoreError(
            f"{path} stayed locked by another process ({error}): look for one that holds it open and is stuck"
        )
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return StoreError(f"cannot open {path} ({error}): check that it is a file and its permissions")
    return StoreError(f"{path}: {error}")


def corrupt(path: Path, detail: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"{path} is damaged, or no store at all ({detail}): stop what uses it, keep a copy, then try "
        f"`sqlite3 {path.name} .recover`, put a backup in its place, or name another file in store.path"
    )
