"""Acknowledged writes survive SIGKILL, concurrent writers and a full disk; other writes raise errors."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from pathlib import Path

import pytest

from instar.errors import StoreFull, StoreUnavailable
from instar.store.sqlite import SqliteStore
from instar.store.sqlite_database import SqliteDatabase, connect
from instar.store.writer import Writer

from .factories import make_call, make_session
from .processes import build_command, kill_child, run_command, start_child


async def load_call_ids(path: Path) -> set[str]:
    store = SqliteStore(path)
    calls = await store.calls("s")
    await store.close()
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    database.close()
    return {call.call_id for call in calls}


async def test_acknowledged_calls_survive_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    rng = random.Random(0)
    acknowledged: set[str] = set()
    for attempt in range(5):
        child = start_child("write", path, str(attempt))
        assert child.stdout is not None
        acknowledged.add(child.stdout.readline().strip())
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        acknowledged.update(kill_child(child))
        assert acknowledged <= await load_call_ids(path)
    assert len(acknowledged) > 50


async def test_several_processes_write_concurrently_without_loss(tmp_path: Path) -> None:
    """No call of the three processes is lost, and no write of this process takes long."""
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    await store.open_session(make_session())
    children = [start_child("count", path, name) for name in ("a", "b")]
    slowest_seconds = 0.0
    own_count = 0
    while any(child.poll() is None for child in children):
        started = time.perf_counter()
        await store.add_calls([make_call(f"own-{own_count}")])
        slowest_seconds = max(slowest_seconds, time.perf_counter() - started)
        own_count += 1
    for child in children:
        lines, _ = child.communicate(timeout=30)
        assert child.returncode == 0
        assert len(lines.split()) == 200
    await store.close()
    assert len(await load_call_ids(path)) == 400 + own_count
    assert own_count > 10
    assert slowest_seconds < 5


async def test_new_file_opened_concurrently_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    stores = await asyncio.gather(*(asyncio.to_thread(SqliteStore, path) for _ in range(8)))
    await asyncio.gather(*(store.open_session(make_session(str(i))) for i, store in enumerate(stores)))
    assert len(await stores[0].sessions()) == 8
    for store in stores:
        await store.close()


async def test_connection_uses_wal_and_full_synchronous(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await SqliteStore(path).close()
    connection = connect(path)
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    connection.close()


def create_database(path: Path, busy_timeout: float = 30.0) -> SqliteDatabase:
    path.touch()
    connection = connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE things (body BLOB)")
    connection.wait_in_begin(busy_timeout)
    return connection


def insert_blob(writer: Writer, size: int) -> asyncio.Future[int]:
    return writer.submit(lambda db: db.execute("INSERT INTO things VALUES (zeroblob(?))", (size,)).rowcount)


async def test_write_to_a_locked_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "small.db"
    writer = Writer(create_database(path, busy_timeout=0.2), str(path))
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match=r"small\.db stayed locked by another process"):
        await asyncio.wait_for(insert_blob(writer, 1), 30)
    blocker.execute("ROLLBACK")
    blocker.close()
    assert await asyncio.wait_for(insert_blob(writer, 1), 30) == 1
    writer.close()


async def test_write_that_does_not_fit_fails_separately(tmp_path: Path) -> None:
    """The other writes in its commit are stored, even if SQLite rolls the transaction back."""
    path = tmp_path / "small.db"
    connection = create_database(path)
    connection.execute("PRAGMA max_page_count = 100")
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    writer = Writer(connection, str(path))
    sizes = [10, 20, 10_000_000, 30, 20_000_000, 40]
    futures = [insert_blob(writer, size) for size in sizes]
    blocker.execute("ROLLBACK")
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 30)
    assert [isinstance(result, StoreFull) for result in results] == [size > 1000 for size in sizes]
    rows = blocker.execute("SELECT LENGTH(body) FROM things ORDER BY 1").fetchall()
    assert [row[0] for row in rows] == [10, 20, 30, 40]
    blocker.close()
    writer.close()


async def test_file_size_limit_loses_no_acknowledged_call(tmp_path: Path) -> None:
    """Calls can be added again after the limit is removed."""
    path = tmp_path / "store.db"
    output = run_command(build_command("fill", path, "limit"))
    await _assert_acknowledged_calls_are_stored(path, output)
    assert "limit-afterwards" in output


def wrap_in_namespace(script: str, *arguments: str) -> list[str]:
    """Return a command that runs the script in a namespace where it may mount file systems."""
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh", *arguments]


def can_mount(tmp_path: Path) -> bool:
    try:
        run_command(wrap_in_namespace(f"mount -t tmpfs none {tmp_path}"))
    except (OSError, AssertionError):
        return False
    return True


async def test_full_disk_loses_no_acknowledged_call(tmp_path: Path) -> None:
    """The file system has a size of 2 MB."""
    if not can_mount(tmp_path):
        pytest.skip("users cannot mount file systems on this system")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    copy.mkdir()
    script = f'mount -t tmpfs -o size=2m none {disk}; "$@"; cp {disk}/store.db* {copy}/'
    output = run_command(wrap_in_namespace(script, *build_command("fill", disk / "store.db", "disk")))
    await _assert_acknowledged_calls_are_stored(copy / "store.db", output)


async def test_closed_store_can_be_read_from_a_read_only_disk(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("users cannot mount file systems on this system")
    disk = tmp_path / "disk"
    run_command(build_command("count", disk / "store.db", "a"))
    script = f'mount --bind {disk} {disk}; mount -o remount,bind,ro {disk}; "$@"'
    assert run_command(wrap_in_namespace(script, *build_command("read", disk / "store.db", ""))) == "200\n"


async def _assert_acknowledged_calls_are_stored(path: Path, output: str) -> None:
    lines = output.splitlines()
    (full_line,) = [line for line in lines if line.startswith("full ")]
    assert int(full_line.split()[1]) > 20
    acknowledged = {line for line in lines if not line.startswith("full ")}
    assert len(acknowledged) > 5
    assert acknowledged == await load_call_ids(path)
