"""Files that are not a store of this version: migrated, or refused with what to do, never harmed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from instar.errors import StoreCorrupt, StoreError, StoreNewer
from instar.store import migrations
from instar.store.schema import APPLICATION_ID, TABLES, VERSION
from instar.store.sqlite import SqliteStore
from instar.store.sqlite_database import connect
from instar.types import Channel, RewardSource

from .factories import make_call, make_session

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


async def fill(path: Path, calls: int = 200) -> None:
    store = SqliteStore(path)
    await store.open_session(make_session())
    await store.add_calls(
        [make_call(str(i), prompt_ids=np.full(500, i, np.int32), ended_at=1.0) for i in range(calls)]
    )
    await store.close()


def damage(path: Path, start: int, stop: int | None, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = content
    path.write_bytes(data)


def content(path: Path) -> bytes:
    return path.read_bytes()


def restore(path: Path, dump: Path) -> None:
    database = sqlite3.connect(path)
    database.executescript(dump.read_text())
    database.close()


def refused(path: Path, error: type[StoreError], *words: str) -> None:
    """By both ways of opening, the file left byte for byte as it was and nothing beside it."""
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(error) as caught:
            SqliteStore(path, read_only=read_only)
        for word in (*words, str(path)):
            assert word in str(caught.value)
        assert path.read_bytes() == before


async def test_newer_version(path: Path) -> None:
    await fill(path)
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {VERSION + 6}")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    refused(path, StoreNewer, f"version {VERSION + 6}", f"up to {VERSION}", "upgrade Instar")


def test_another_programs_file(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.commit()
    database.close()
    refused(path, StoreError, "another program", "store.path")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"once upon a time " * 100, b"\x00" * 8192])
def test_no_database_at_all(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refused(path, StoreCorrupt, "damaged", ".recover")


async def test_cut_short(path: Path) -> None:
    await fill(path)
    damage(path, 9000, None, b"")
    with pytest.raises(StoreCorrupt, match=r"store\.db is damaged"):
        SqliteStore(path)


async def test_damaged_pages(path: Path) -> None:
    """Found when they are read; the error names the file and what to do."""
    await fill(path)
    damage(path, 60 * 4096, 90 * 4096, b"\xa5" * 30 * 4096)
    store = SqliteStore(path)
    with pytest.raises(StoreCorrupt, match=r"store\.db is damaged.*backup"):
        await store.calls("s")
    await store.close()


def test_missing_table(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("CREATE TABLE runs (run_id TEXT)")
    database.commit()
    database.close()
    with pytest.raises(StoreCorrupt, match="the table calls is missing"):
        SqliteStore(path)


def test_folder_in_its_place(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StoreError, match=r"store\.db"):
        SqliteStore(path)
    (path.parent / "file").touch()
    with pytest.raises(StoreError, match="cannot create"):
        SqliteStore(path.parent / "file" / "store.db")


def test_reader_makes_nothing(path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        SqliteStore(path, read_only=True)
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreError, match="is empty"):
        SqliteStore(path, read_only=True)
    assert path.stat().st_size == 0


async def test_reader_of_a_closed_store_leaves_it_as_it_is(path: Path) -> None:
    await fill(path, calls=3)
    before = content(path)
    store = SqliteStore(path, read_only=True)
    assert len(await store.calls("s")) == 3
    with pytest.raises(StoreError, match="reading only"):
        await store.add_calls([make_call("late")])
    await store.close()
    assert content(path) == before


async def test_reader_does_not_migrate(path: Path) -> None:
    await fill(path)
    connection = connect(path, read_only=True)
    with pytest.raises(StoreError, match=rf"version {VERSION}, this Instar reads {VERSION + 1}"):
        migrations.check_version(connection, path, version=VERSION + 1)
    connection.close()
    assert version_of(path) == VERSION


# --- migrations ---------------------------------------------------------------------------------

TO_NEXT = {VERSION: ("ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT 'none'",)}
TO_NOWHERE = {VERSION: (*TO_NEXT[VERSION], "INSERT INTO no_such_table VALUES (1)")}


def version_of(path: Path) -> int:
    database = sqlite3.connect(path)
    version = database.execute("PRAGMA user_version").fetchone()[0]
    database.close()
    return version


async def test_older_file_is_migrated_with_its_rows(path: Path) -> None:
    await fill(path)
    connection = connect(path)
    migrations.create_or_migrate(connection, path, version=VERSION + 1, migrations=TO_NEXT)
    assert "note" in [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    assert connection.execute("SELECT COUNT(*) FROM calls").fetchone()[0] == 200
    connection.close()
    assert version_of(path) == VERSION + 1


async def test_migration_that_fails_changes_nothing(path: Path) -> None:
    await fill(path)
    connection = connect(path)
    with pytest.raises(sqlite3.OperationalError):
        migrations.create_or_migrate(connection, path, version=VERSION + 1, migrations=TO_NOWHERE)
    assert "note" not in [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    connection.close()
    assert version_of(path) == VERSION


def test_every_older_version_has_its_migration_and_fixture() -> None:
    assert sorted(migrations.MIGRATIONS) == list(range(1, VERSION))
    fixtures = {each.name for each in FIXTURES.glob("v*.sql")}
    assert fixtures == {f"v{n}.sql" for n in range(1, VERSION + 1)}


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("v*.sql")), ids=lambda each: each.stem)
async def test_file_of_each_released_version_opens(path: Path, fixture: Path) -> None:
    """Written by that version (``sqlite3 store.db .dump`` and the two pragmas): same rows, and the
    same columns as a fresh file."""
    restore(path, fixture)
    store = SqliteStore(path)
    (row,) = await store.sessions()
    assert (row.session.session_id, row.calls, row.sampled_tokens, row.reward) == ("s", 2, 4, 0.5)
    first, second = await store.calls("s")
    assert second.prompt_ids.tolist() == [*first.sequence.tolist(), 9]
    assert [message["content"] for message in second.messages] == ["hello", "hi", "go on"]
    assert [reward.source for reward in await store.rewards("s")] == [RewardSource.RULE]
    assert (await store.progress("run")).groups_ready == 1
    assert await store.groups("run", Channel.TRAIN, unclaimed_in_epoch=0) == []
    assert [part.call_id for part in await store.call_deltas("s")] == ["first", "second"]
    await store.close()
    database = sqlite3.connect(path)
    for table in TABLES:
        columns = [column[1] for column in database.execute(f"PRAGMA table_info({table.name})")]
        assert columns == list(table.columns)
    database.close()
