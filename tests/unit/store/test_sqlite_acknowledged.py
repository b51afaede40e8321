"""Acknowledged calls that are missing from a damaged write-ahead log are reported at the next start."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from pathlib import Path

import pytest

from instar.errors import ConflictError
from instar.store.sqlite import SqliteStore

from .factories import make_call, make_session
from .processes import kill_child, start_child


def write_until_killed(path: Path) -> int:
    """Write to the store in a process that is killed, and return the number of acknowledged calls."""
    child = start_child("write", path, "0")
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(300)]
    return len(lines) + len(kill_child(child))


def count_calls(path: Path) -> int:
    database = sqlite3.connect(path)
    count = database.execute("SELECT COUNT(*) FROM calls").fetchone()[0]
    database.close()
    return count


async def open_and_close(path: Path) -> None:
    await SqliteStore(path).close()


def get_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.mark.parametrize("kept_fraction", [0.0, 0.5, 0.9])
async def test_missing_acknowledged_calls_are_reported_once(
    path: Path, caplog: pytest.LogCaptureFixture, kept_fraction: float
) -> None:
    await open_and_close(path)
    acknowledged_count = write_until_killed(path)
    wal_file = path.with_name("store.db-wal")
    os.truncate(wal_file, int(wal_file.stat().st_size * kept_fraction))
    # Counting opens the file before the store does, as another program might.
    missing_count = acknowledged_count - count_calls(path)
    assert missing_count > 0
    await open_and_close(path)
    [warning] = get_warnings(caplog)
    assert str(path) in warning
    # Each of the child's 8 clients may have a write that was stored but not acknowledged.
    assert missing_count - 8 <= int(warning.split()[0]) <= missing_count + 8
    caplog.clear()
    await open_and_close(path)
    assert get_warnings(caplog) == []


async def test_killed_writer_without_damage_is_not_reported(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        write_until_killed(path)
        await open_and_close(path)
    assert get_warnings(caplog) == []


async def test_failed_writes_are_not_reported_as_missing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(path)
    await store.open_session(make_session())
    await store.add_calls([make_call("a")])
    # The batch is rolled back, and its calls are then written one by one.
    writes = (store.add_calls([make_call(name)]) for name in ("b", "a", "a", "a"))
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), *[ConflictError] * 3]
    await store.close()
    await open_and_close(path)
    assert get_warnings(caplog) == []


async def test_new_store_after_a_deleted_one_is_not_reported(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_until_killed(path)
    for file in (path, path.with_name("store.db-wal"), path.with_name("store.db-shm")):
        file.unlink()
    await open_and_close(path)
    assert get_warnings(caplog) == []
