"""Tests for the SQLite store: conformance, shared commits, failed writes, file size and query times."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from instar.config import RunConfig
from instar.errors import ConflictError, SessionNotFound, StoreCorrupt, StoreError
from instar.store.base import Progress, Run
from instar.store.database import Database
from instar.store.factory import open_store
from instar.store.sqlite import SqliteStore
from instar.types import Channel, Group, GroupStatus, StepState

from .conformance import StoreConformance, StoreFactory
from .factories import (
    CALCULATOR,
    POLICY_ID,
    RUN_ID,
    assert_same_call,
    ids,
    make_call,
    make_claim,
    make_group,
    make_next_call,
    make_session,
    user,
)


class TestSqliteStore(StoreConformance):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> StoreFactory:
        return lambda: SqliteStore(tmp_path / "store.db")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    yield store
    await store.close()


async def test_open_store_opens_the_configured_store(tmp_path: Path) -> None:
    config = RunConfig(name="demo", dir=tmp_path / "deep" / "demo")
    with pytest.raises(StoreError, match="no store found at"):
        open_store(config, read_only=True)
    assert not config.run_dir.exists()
    store = open_store(config)
    await store.put_run(Run(RUN_ID, POLICY_ID, {}))
    assert config.store_path.stat().st_mode & 0o077 == 0
    reader = open_store(config, read_only=True)
    assert len(await reader.runs()) == 1
    with pytest.raises(StoreError, match="opened read-only"):
        await reader.put_run(Run(RUN_ID, POLICY_ID, {}))
    await reader.close()
    await store.close()


async def test_failed_write_in_a_shared_commit_is_rolled_back_alone(store: SqliteStore) -> None:
    """A failed write stores nothing, and the other writes in its commit are stored."""
    await store.open_session(make_session())
    commits_before = store.commit_count
    writes = [
        store.add_calls([make_call(f"new-{i}"), make_call("duplicate" if i % 2 else f"other-{i}")])
        for i in range(40)
    ]
    results = await asyncio.gather(*writes, return_exceptions=True)
    # Of the 20 writes with the duplicate id, only the first succeeds.
    assert sum(isinstance(result, ConflictError) for result in results) == 19
    assert sum(result is None for result in results) == 21
    assert len(await store.calls("s")) == 42
    assert store.commit_count - commits_before <= 5


async def test_concurrent_writes_share_commits(store: SqliteStore) -> None:
    await store.open_session(make_session())
    commits_before = store.commit_count

    async def add_turns(client: int) -> None:
        for turn in range(20):
            await store.add_calls([make_call(f"{client}-{turn}")])

    await asyncio.gather(*(add_turns(client) for client in range(32)))
    assert len(await store.calls("s")) == 640
    assert store.commit_count - commits_before <= 640 / 5


async def test_add_calls_uses_one_statement(store: SqliteStore) -> None:
    """One statement is enough if the session, the tools and the base call are already stored. Calls that are
    rejected in one batch still raise different errors."""
    await store.open_session(make_session())
    first = make_call("first", tools=(CALCULATOR,))
    await store.add_calls([first])
    statements: list[str] = []
    connection = store._writer._db  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
    assert isinstance(connection, sqlite3.Connection)
    connection.set_trace_callback(statements.append)
    second = make_next_call(first, "second", ids(9), user("and?"), tools=(CALCULATOR,))
    await store.add_calls([second])
    (statement,) = statements
    assert statement.startswith("INSERT INTO calls")

    wrong = make_next_call(second, "wrong", ids(9), user("and?"), prompt_ids=ids(*range(50, 60)))
    third = make_next_call(second, "third", ids(9), user("and?"))
    results = await asyncio.gather(
        store.add_calls([wrong]),
        store.add_calls([make_call("lost", "missing")]),
        store.add_calls([make_call("first")]),
        store.add_calls([third]),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [StoreError, SessionNotFound, ConflictError, type(None)]
    assert "does not begin with the tokens of its base second" in str(results[0])
    assert "no session missing" in str(results[1])
    assert [call.call_id for call in await store.calls("s")] == ["first", "second", "third"]


async def test_write_with_an_unsupported_value_fails_separately(store: SqliteStore) -> None:
    await store.open_session(make_session())
    results = await asyncio.gather(
        store.add_calls([make_call("before")]),
        store.add_calls([make_call("broken", finish_reason="\udcff")]),
        store.add_calls([make_call("after")]),
        return_exceptions=True,
    )
    assert [result is None for result in results] == [True, False, True]
    assert [call.call_id for call in await store.calls("s")] == ["before", "after"]


async def test_write_interrupted_by_an_error_leaves_no_open_transaction(tmp_path: Path) -> None:
    """Otherwise, later writes would be acknowledged inside that transaction and lost with it."""
    store = SqliteStore(tmp_path / "store.db")
    await store.open_session(make_session())
    writer = store._writer  # pyright: ignore[reportPrivateUsage]
    assert writer is not None

    def fail_once(db: Database) -> None:
        writer.lease_check = None
        raise MemoryError

    writer.lease_check = fail_once
    with pytest.raises(MemoryError):
        await store.open_session(make_session("other"))
    await store.add_calls([make_call("call")])
    await store.open_session(make_session("third"))
    await store.close()
    store = SqliteStore(tmp_path / "store.db")
    assert [call.call_id for call in await store.calls("s")] == ["call"]
    await store.close()


async def test_add_calls_reads_base_calls_evicted_from_the_cache(store: SqliteStore) -> None:
    store.base_call_cache.max_size = 2
    await store.open_session(make_session())
    calls = [make_call("0")]
    await store.add_calls(calls)
    for turn in range(1, 9):
        calls.append(make_next_call(calls[-1], str(turn), ids(turn), user("and?")))
        await store.add_calls([calls[-1]])
        await store.add_calls([make_next_call(calls[0], f"branch-{turn}", ids(turn), user("or?"))])
    with pytest.raises(StoreError, match="its base call missing is not stored"):
        await store.add_calls([make_next_call(calls[-1], "late", ids(1), user("?"), base_id="missing")])
    stored = {call.call_id: call for call in await store.calls("s")}
    assert len(stored) == 17
    for call in calls:
        np.testing.assert_array_equal(stored[call.call_id].prompt_ids, call.prompt_ids)


async def test_write_cancelled_while_queued_is_not_executed(store: SqliteStore) -> None:
    await store.open_session(make_session())
    blocker = sqlite3.connect(store.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    first = asyncio.ensure_future(store.add_calls([make_call("first")]))
    await asyncio.sleep(0.05)
    second = asyncio.ensure_future(store.add_calls([make_call("second")]))
    await asyncio.sleep(0.05)
    second.cancel()
    assert not first.done()
    blocker.execute("ROLLBACK")
    blocker.close()
    await first
    await store.add_calls([make_call("third")])
    assert [call.call_id for call in await store.calls("s")] == ["first", "third"]


def test_store_works_from_consecutive_event_loops(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    asyncio.run(store.open_session(make_session()))
    asyncio.run(store.add_calls([make_call()]))
    assert len(asyncio.run(store.calls("s"))) == 1
    asyncio.run(store.close())


async def test_long_session_stores_only_new_tokens(store: SqliteStore) -> None:
    """The session has 100 turns and up to 120k tokens of context."""
    turns, new_tokens, sampled_tokens = 100, 1000, 200
    rng = np.random.default_rng(0)

    def make_tokens(count: int) -> np.ndarray:
        return rng.integers(0, 150_000, count, dtype=np.int32)

    empty_size = measure_file_size(store.path)
    await store.open_session(make_session())
    call = make_call(
        "0",
        prompt_ids=make_tokens(new_tokens),
        sampled_ids=make_tokens(sampled_tokens),
        tools=(CALCULATOR,) * 50,
    )
    await store.add_calls([call])
    prompt_tokens = len(call.prompt_ids)
    for turn in range(1, turns):
        message = user(f"turn {turn} " + "word " * new_tokens)
        call = make_next_call(
            call,
            str(turn),
            make_tokens(new_tokens),
            message,
            sampled_ids=make_tokens(sampled_tokens),
            tools=call.tools,
        )
        prompt_tokens += len(call.prompt_ids)
        await store.add_calls([call])
    assert len(call.sequence) == 120_000
    size = measure_file_size(store.path) - empty_size
    # 4 bytes per token id, 4 more for the logprob of a sampled token, and the text of the messages.
    text_bytes = turns * 5 * new_tokens
    min_size = turns * (4 * new_tokens + 8 * sampled_tokens) + text_bytes
    assert size < 1.3 * min_size
    # The token ids of the complete prompts alone would take 4 * prompt_tokens bytes.
    assert size < 0.06 * 4 * prompt_tokens

    started = time.perf_counter()
    calls = await store.calls("s")
    seconds = time.perf_counter() - started
    assert_same_call(calls[-1], replace(call, ended_at=calls[-1].ended_at))
    # The prompts are views of one array, not a copy of the context per turn.
    assert all(np.shares_memory(call.prompt_ids, calls[-1].prompt_ids) for call in calls)
    assert seconds < 2


def measure_file_size(path: Path) -> int:
    database = sqlite3.connect(path)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    return path.stat().st_size


async def test_tools_shared_by_several_calls_are_stored_once(store: SqliteStore) -> None:
    await store.open_session(make_session())
    await store.add_calls([make_call(str(i), tools=(CALCULATOR,)) for i in range(5)])
    database = sqlite3.connect(store.path)
    assert database.execute("SELECT COUNT(*) FROM tools").fetchone()[0] == 1
    database.close()
    assert all(call.tools == (CALCULATOR,) for call in await store.calls("s"))


async def test_call_with_changed_tokens_raises_corrupt(store: SqliteStore) -> None:
    """One sampled token is changed in the file."""
    await store.open_session(make_session())
    root = make_call("root")
    await store.add_calls([root, make_next_call(root, "next", ids(9), user("x"))])
    database = sqlite3.connect(store.path)
    database.execute(
        "UPDATE calls SET sampled_ids = ? WHERE call_id = 'root'", (np.array([7, 9], "<i4").tobytes(),)
    )
    database.commit()
    database.close()
    with pytest.raises(StoreCorrupt, match="call root of session s"):
        await store.calls("s")


async def measure_best_seconds(read: Callable[[], Awaitable[object]]) -> float:
    best = float("inf")
    for _ in range(30):
        started = time.perf_counter()
        await read()
        best = min(best, time.perf_counter() - started)
    return best


async def test_unclaimed_groups_query_does_not_slow_down_with_claimed_groups(store: SqliteStore) -> None:
    async def add_claimed_groups(indexes: range) -> None:
        await asyncio.gather(
            *(store.open_group(make_group(f"g{i}", i, status=GroupStatus.READY)) for i in indexes)
        )
        await store.claim_step(RUN_ID, indexes[0], [make_claim(f"k{i}", group_id=f"g{i}") for i in indexes])

    async def list_unclaimed() -> list[Group]:
        return await store.groups(RUN_ID, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=0)

    await add_claimed_groups(range(50))
    seconds_with_few = await measure_best_seconds(list_unclaimed)
    await add_claimed_groups(range(50, 8000))
    await store.open_group(make_group("new", 8000, status=GroupStatus.READY))
    seconds_with_many = await measure_best_seconds(list_unclaimed)
    assert [group.group_id for group in await list_unclaimed()] == ["new"]
    assert seconds_with_many < 3 * seconds_with_few + 0.0003


async def test_progress_does_not_slow_down_with_groups_and_sessions(store: SqliteStore) -> None:
    await store.put_run(Run(RUN_ID, POLICY_ID, {}))

    async def get_progress() -> Progress:
        return await store.progress(RUN_ID)

    async def add_groups_and_sessions(indexes: range) -> None:
        await asyncio.gather(
            *(store.open_group(make_group(f"g{i}", i, status=GroupStatus.READY)) for i in indexes),
            *(store.open_session(make_session(f"s{i}")) for i in indexes),
            *(store.claim_step(RUN_ID, i, [make_claim(f"k{i}", group_id=f"g{i}")]) for i in indexes[::50]),
        )

    await add_groups_and_sessions(range(50))
    seconds_with_few = await measure_best_seconds(get_progress)
    await add_groups_and_sessions(range(50, 4000))
    seconds_with_many = await measure_best_seconds(get_progress)
    assert (await store.progress(RUN_ID)).groups_ready == 4000
    assert seconds_with_many < 3 * seconds_with_few + 0.0005
    await store.advance_step(RUN_ID, 0, StepState.COMMITTED)
    assert (await store.progress(RUN_ID, Channel.TRAIN)).groups_consumed == 1


async def test_store_method_called_through_the_class_runs_its_query(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    await SqliteStore.put_run(store, Run("r", "p", {}))
    assert await SqliteStore.run(store, "r") == await store.run("r")
    await store.close()
