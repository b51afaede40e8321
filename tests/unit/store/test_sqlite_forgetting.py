"""Forgotten sessions leave no text in the store's files, and are not reported as lost."""

from __future__ import annotations

import logging
import random
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from instar.async_utils import map_concurrently
from instar.store.sqlite import SqliteStore
from instar.store.sqlite_database import erase_deleted

from .conformance_forgetting import add_live_session
from .factories import RUN_ID, make_call, make_session


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def read_files(path: Path) -> bytes:
    """Return the content of the store's files, including the write-ahead log."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")))


def make_texts(count: int) -> list[str]:
    """Return different texts in an order that spreads them over the indexes' pages."""
    texts = [f"private-{number:06d}-{'x' * (number % 300)}-end" for number in range(count)]
    random.Random(0).shuffle(texts)
    return texts


async def add_sessions(stores: Sequence[SqliteStore], texts: Sequence[str]) -> None:
    """Add a session with each text, in several processes' stores."""

    async def add(number: int) -> None:
        await add_live_session(stores[number % len(stores)], f"s{number}", texts[number])

    await map_concurrently(add, range(len(texts)), max_concurrent=50)


async def forget(store: SqliteStore, numbers: Iterable[int]) -> None:
    await store.forget_sessions(RUN_ID, [f"s{number}" for number in numbers])


def find_texts(path: Path, texts: Sequence[str]) -> list[int]:
    """Return the numbers of the texts that the store's files contain."""
    content = read_files(path)
    return [number for number, text in enumerate(texts) if text.encode() in content]


async def test_forgotten_texts_are_erased_from_the_files(path: Path) -> None:
    """Another writer has the store open, and the pages of tables and indexes were split many times."""
    store, other = SqliteStore(path), SqliteStore(path)
    texts = make_texts(400)
    await add_sessions((store, other), texts)
    assert find_texts(path, texts) == list(range(400))
    for start in range(0, 400, 40):
        await forget(store, range(start, start + 40, 2))
    assert await store.erase_deleted(rewrite=True)
    assert find_texts(path, texts) == list(range(1, 400, 2))
    # The store stays usable for the other writer, and its later log does not bring the texts back.
    assert (await other.calls("s1"))[0].reply["content"] == texts[1]
    await add_live_session(other, "later", "later text")
    assert find_texts(path, texts) == list(range(1, 400, 2))
    await store.close()
    await other.close()


async def test_erase_without_rewrite_empties_the_log_and_overwrites_rows(path: Path) -> None:
    store = SqliteStore(path)
    texts = ["private text " * 20, "other text " * 20]
    await add_sessions([store], texts)
    await forget(store, [0])
    assert find_texts(path, texts) == [0, 1]  # the log still contains the session
    assert await store.erase_deleted(rewrite=False)
    assert find_texts(path, texts) == [1]
    await store.close()


async def test_erase_while_a_reader_blocks_the_log_returns_false(path: Path) -> None:
    store = SqliteStore(path)
    await add_sessions([store], ["private text"])
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM calls").fetchone()
    await forget(store, [0])
    assert not erase_deleted(path, rewrite=False, timeout=0.05)
    reader.close()
    assert await store.erase_deleted(rewrite=False)
    await store.close()


async def test_forgotten_calls_are_not_reported_as_lost(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteStore(path)
    await add_sessions([store], ["first", "second", "third"])
    await forget(store, [2])
    await store.close()
    await SqliteStore(path).close()
    await (store := SqliteStore(path)).forget_sessions(RUN_ID, ["s0", "s1"])
    await store.close()
    store = SqliteStore(path)
    await store.add_calls([make_call("next")], new_session=make_session())
    await store.close()
    await SqliteStore(path).close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_lost_calls_are_reported_after_forgetting(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteStore(path)
    await add_sessions([store], ["first", "second"])
    await forget(store, [0])
    await store.close()
    database = sqlite3.connect(path)
    database.execute("DELETE FROM calls")  # as after a restored backup
    database.commit()
    database.close()
    await SqliteStore(path).close()
    assert "acknowledged call(s) are missing" in caplog.text
