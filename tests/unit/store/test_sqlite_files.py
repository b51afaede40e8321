"""Files of older versions are migrated. Newer, damaged and foreign files are rejected with advice."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from instar.errors import ConflictError, StoreCorrupt, StoreError, StoreTooNew
from instar.store import migrations
from instar.store.schema import APPLICATION_ID, CALLS, TABLES, VERSION
from instar.store.sqlite import SqliteStore
from instar.store.sqlite_database import connect
from instar.types import Call, Channel, RewardSource, new_id

from .factories import make_call, make_session

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


async def fill_store(path: Path, call_count: int = 200) -> None:
    store = SqliteStore(path)
    await store.open_session(make_session())
    await store.add_calls(
        [make_call(str(i), prompt_ids=np.full(500, i, np.int32), ended_at=1.0) for i in range(call_count)]
    )
    await store.close()


def overwrite(path: Path, start: int, stop: int | None, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = content
    path.write_bytes(data)


def read_bytes(path: Path) -> bytes:
    return path.read_bytes()


def restore(path: Path, dump: Path) -> None:
    database = sqlite3.connect(path)
    database.executescript(dump.read_text())
    database.close()


def assert_open_fails(path: Path, error: type[StoreError], *words: str) -> None:
    """Check that opening fails for writing and for reading, and that it does not change the file."""
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(error) as caught:
            SqliteStore(path, read_only=read_only)
        for word in (*words, str(path)):
            assert word in str(caught.value)
        assert path.read_bytes() == before


async def test_open_store_of_a_newer_version_raises(path: Path) -> None:
    await fill_store(path)
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {VERSION + 6}")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    assert_open_fails(path, StoreTooNew, f"version {VERSION + 6}", f"up to {VERSION}", "upgrade Instar")


def test_open_file_of_another_program_raises(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.commit()
    database.close()
    assert_open_fails(path, StoreError, "another program", "store.path")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"not a database " * 100, b"\x00" * 8192])
def test_open_file_that_is_not_a_database_raises(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert_open_fails(path, StoreCorrupt, "damaged", ".recover")


async def test_open_truncated_file_raises(path: Path) -> None:
    await fill_store(path)
    overwrite(path, 9000, None, b"")
    with pytest.raises(StoreCorrupt, match=r"store\.db is damaged"):
        SqliteStore(path)


async def test_read_of_damaged_pages_raises(path: Path) -> None:
    """The damage is found when the pages are read, and the error names the file and says what to do."""
    await fill_store(path)
    overwrite(path, 95 * 4096, 125 * 4096, b"\xa5" * 30 * 4096)
    store = SqliteStore(path)
    with pytest.raises(StoreCorrupt, match=r"store\.db is damaged.*backup"):
        await store.calls("s")
    await store.close()


def test_open_store_without_a_table_raises(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")
    database.execute("CREATE TABLE runs (run_id TEXT)")
    database.commit()
    database.close()
    with pytest.raises(StoreCorrupt, match="the table calls is missing"):
        SqliteStore(path)


def test_open_invalid_path_raises(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StoreError, match=r"store\.db"):
        SqliteStore(path)
    (path.parent / "file").touch()
    with pytest.raises(StoreError, match="cannot create"):
        SqliteStore(path.parent / "file" / "store.db")


def test_read_only_store_creates_no_file(path: Path) -> None:
    with pytest.raises(StoreError, match="no store found at"):
        SqliteStore(path, read_only=True)
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreError, match="is empty"):
        SqliteStore(path, read_only=True)
    assert path.stat().st_size == 0


async def test_read_only_store_does_not_change_a_closed_file(path: Path) -> None:
    await fill_store(path, call_count=3)
    before = read_bytes(path)
    store = SqliteStore(path, read_only=True)
    assert len(await store.calls("s")) == 3
    with pytest.raises(StoreError, match="opened read-only"):
        await store.add_calls([make_call("late")])
    await store.close()
    assert read_bytes(path) == before


async def test_check_version_does_not_migrate(path: Path) -> None:
    await fill_store(path)
    connection = connect(path, read_only=True)
    with pytest.raises(
        StoreError, match=rf"version {VERSION}, but this version of Instar requires {VERSION + 1}"
    ):
        migrations.check_version(connection, path, version=VERSION + 1)
    connection.close()
    assert read_version(path) == VERSION


# --- migrations ---------------------------------------------------------------------------------

NEXT_MIGRATION = {VERSION: ("ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT 'none'",)}
FAILING_MIGRATION = {VERSION: (*NEXT_MIGRATION[VERSION], "INSERT INTO missing_table VALUES (1)")}


def read_version(path: Path) -> int:
    database = sqlite3.connect(path)
    version = database.execute("PRAGMA user_version").fetchone()[0]
    database.close()
    return version


async def test_migration_of_an_older_file_keeps_its_rows(path: Path) -> None:
    await fill_store(path)
    connection = connect(path)
    migrations.create_or_migrate(connection, path, version=VERSION + 1, migrations=NEXT_MIGRATION)
    assert "note" in [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    assert connection.execute("SELECT COUNT(*) FROM calls").fetchone()[0] == 200
    connection.close()
    assert read_version(path) == VERSION + 1


async def test_failed_migration_changes_nothing(path: Path) -> None:
    await fill_store(path)
    connection = connect(path)
    with pytest.raises(sqlite3.OperationalError):
        migrations.create_or_migrate(connection, path, version=VERSION + 1, migrations=FAILING_MIGRATION)
    assert "note" not in [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    connection.close()
    assert read_version(path) == VERSION


def test_every_version_has_a_fixture_and_every_older_one_a_migration() -> None:
    assert sorted(migrations.MIGRATIONS) == list(range(1, VERSION))
    fixtures = {path.name for path in FIXTURES.glob("v*.sql")}
    assert fixtures == {f"v{n}.sql" for n in range(1, VERSION + 1)}


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("v*.sql")), ids=lambda path: path.stem)
async def test_files_of_released_versions_are_migrated(path: Path, fixture: Path) -> None:
    """Each fixture was written by its version: the pragmas application_id and user_version, and the output of
    ``sqlite3 store.db .dump``. Migration keeps the rows and results in the columns of a new file."""
    restore(path, fixture)
    store = SqliteStore(path)
    (row,) = await store.sessions()
    assert (row.session.session_id, row.call_count, row.sampled_tokens, row.reward) == ("s", 2, 4, 0.5)
    first, second = await store.calls("s")
    assert second.prompt_ids.tolist() == [*first.sequence.tolist(), 9]
    assert [message["content"] for message in second.messages] == ["hello", "hi", "go on"]
    assert [reward.source for reward in await store.rewards("s")] == [RewardSource.RULE]
    assert (await store.progress("run")).groups_ready == 1
    assert await store.groups("run", Channel.TRAIN, unclaimed_in_epoch=0) == []
    assert [delta.call_id for delta in await store.call_deltas("s")] == ["first", "second"]
    await store.close()
    database = sqlite3.connect(path)
    for table in TABLES:
        columns = [column[1] for column in database.execute(f"PRAGMA table_info({table.name})")]
        assert columns == list(table.columns)
    database.close()


async def test_migration_to_version_5_finds_the_users_and_judged_sessions(path: Path) -> None:
    restore(path, FIXTURES / "v4.sql")
    database = sqlite3.connect(path)
    database.execute("UPDATE sessions SET external_id = 'user:Ada'")
    session_id = new_id("sess")
    for key, answer in ((b"1", {"answer": "good", "session": session_id}), (b"2", {"answer": "bad"})):
        values = (key, "run", json.dumps(answer, separators=(",", ":")), 0.25, 1.0)
        database.execute("INSERT INTO judgments VALUES (?, ?, ?, ?, ?)", values)
    database.commit()
    database.close()
    store = SqliteStore(path)
    assert await store.session_ids("run", user_id="Ada") == ["s"]
    rows = await store.read(lambda db: db.execute("SELECT session_id FROM judgments ORDER BY key").fetchall())
    assert [row["session_id"] for row in rows] == [session_id, None]
    await store.close()


async def test_migration_to_version_6_gives_steps_and_claims_to_the_policy_of_the_run(path: Path) -> None:
    restore(path, FIXTURES / "v5.sql")
    store = SqliteStore(path)
    (claim,) = await store.claims("run")
    assert (claim.policy_id, claim.run_id, claim.step) == ("run", "run", 1)
    assert [(step.policy_id, step.run_id) for step in await store.steps("run")] == [("run", "run")]
    with pytest.raises(ConflictError):
        await store.claim_step("run", 2, [replace(claim, step=None)])
    await store.close()


def test_calls_table_has_a_column_for_every_field_of_a_call() -> None:
    assert {field.name for field in fields(Call)} - set(CALLS.columns) == {"tools"}
