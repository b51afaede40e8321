"""Create a store with a million calls by inserting a few encoded rows repeatedly, under new ids."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.store.call_rows import encode_call
from instar.store.rows import encode_claim, encode_group, encode_reward, encode_session
from instar.store.schema import CALLS, CLAIMS, GROUPS, REWARDS, SESSIONS, TAGS
from instar.store.schema_indexes import INDEXES
from instar.store.sqlite import SqliteStore
from instar.store.table import Table
from instar.types import (
    Channel,
    Claim,
    ClaimOutcome,
    Group,
    GroupStatus,
    Reward,
    RewardSource,
    SessionStatus,
    Task,
)
from store_parts.calls import RUN, make_session, make_turns

TURNS, GROUP_SIZE = 4, 8
CALL_BYTES = 400
"""The number of bytes that each call adds. A million calls take one gigabyte."""
UNCLAIMED_GROUPS = 96
"""The number of groups that are ready but not yet claimed by a step."""
GROUPS_PER_STEP = 64
DISTINCT_CONVERSATIONS = 16
"""The number of distinct conversations. All others repeat them."""


@dataclass(frozen=True, slots=True)
class StoreShape:
    calls: int

    @property
    def sessions(self) -> int:
        return self.calls // TURNS

    @property
    def groups(self) -> int:
        return self.sessions // GROUP_SIZE


async def make_store(path: Path, calls: int) -> StoreShape:
    """Create a store with grouped sessions, each with a reward.

    Nearly all groups are consumed, a few sessions failed, and half of the sessions have tags.
    """
    shape = StoreShape(calls)
    await SqliteStore(path).close()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute("PRAGMA cache_size = -400000")
    index_names = [sql.split()[2 + sql.startswith("CREATE UNIQUE")] for sql in INDEXES]
    for name in index_names:
        database.execute(f"DROP INDEX {name}")
    database.execute("BEGIN")
    _insert(database, GROUPS, _make_groups(shape), ("consumed", "claimed_epoch"))
    _insert(database, SESSIONS, _make_sessions(shape), ("reward",))
    _insert(database, CALLS, _make_calls(shape))
    _insert(database, REWARDS, _make_rewards(shape))
    _insert(database, CLAIMS, _make_claims(shape))
    _insert(database, TAGS, _make_tags(shape))
    database.execute("COMMIT")
    for statement in INDEXES:
        database.execute(statement)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()
    return shape


def _insert(
    database: sqlite3.Connection,
    table: Table,
    rows: Iterator[dict[str, Any]],
    extra_columns: tuple[str, ...] = (),
) -> None:
    names = (*table.insert_columns, *extra_columns)
    sql = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)})"
    database.executemany(sql, ([row[name] for name in names] for row in rows))


def _make_session_id(number: int) -> str:
    return f"sess-{number:020x}"


def _make_group_id(number: int) -> str:
    return f"group-{number:019x}"


def _choose_reward(number: int) -> float:
    """Return -1 for the first 1000 sessions, and then rewards that differ within a group."""
    return -1.0 if number < 1000 else float(number % 3 == 0)


def _make_groups(shape: StoreShape) -> Iterator[dict[str, Any]]:
    group = Group(
        "", RUN, Channel.TRAIN, 0, GROUP_SIZE, Task("t", {"q": 1}), GroupStatus.READY, created_at=1.0
    )
    row = encode_group(group)
    for number in range(shape.groups):
        is_consumed = number < shape.groups - UNCLAIMED_GROUPS
        ids = {"group_id": _make_group_id(number), "idx": number, "task_id": f"t{number % 500}"}
        yield row | ids | {"consumed": int(is_consumed), "claimed_epoch": 0 if is_consumed else -1}


def _make_sessions(shape: StoreShape) -> Iterator[dict[str, Any]]:
    row = encode_session(make_session(status=SessionStatus.COMPLETED), None)
    for number in range(shape.sessions):
        yield row | {
            "session_id": _make_session_id(number),
            "group_id": _make_group_id(number // GROUP_SIZE),
            "slot": number % GROUP_SIZE,
            "task_id": f"t{number // GROUP_SIZE % 500}",
            "status": "failed" if number % 5000 == 17 else "completed",
            "created_at": 1.0 + number,
            "ended_at": 2.0 + number,
            "reward": _choose_reward(number),
        }


def _make_calls(shape: StoreShape) -> Iterator[dict[str, Any]]:
    """Yield conversations in which each call extends the previous one."""
    conversations = [
        [
            dict(zip(CALLS.insert_columns, encode_call(call).values, strict=True))
            for call in make_turns(make_session(), CALL_BYTES + number, TURNS)
        ]
        for number in range(DISTINCT_CONVERSATIONS)
    ]
    for number in range(shape.sessions):
        previous_call_id = None
        for turn, row in enumerate(conversations[number % DISTINCT_CONVERSATIONS]):
            call_id = f"call-{number * TURNS + turn:020x}"
            ids = {"call_id": call_id, "request_id": call_id, "session_id": _make_session_id(number)}
            yield row | ids | {"base_id": previous_call_id, "parent_id": previous_call_id}
            previous_call_id = call_id


def _make_rewards(shape: StoreShape) -> Iterator[dict[str, Any]]:
    row = encode_reward(Reward("", 0.0, RewardSource.RULE, scorer="math", created_at=1.0))
    row |= {"run_id": RUN, "agent_id": "agent", "policy_id": RUN}
    for number in range(shape.sessions):
        yield row | {"session_id": _make_session_id(number), "value": _choose_reward(number)}
        if number < 1000:
            yield row | {
                "session_id": _make_session_id(number),
                "value": 0.5,
                "source": "judge",
                "scorer": "judge:outcome",
            }


def _make_claims(shape: StoreShape) -> Iterator[dict[str, Any]]:
    row = encode_claim(Claim(RUN, 0, "", "", None, ClaimOutcome.TRAINED, reward=0.0, advantage=0.0), 1)
    for number in range((shape.groups - UNCLAIMED_GROUPS) * GROUP_SIZE):
        group = number // GROUP_SIZE
        yield row | {
            "sample_key": f"{_make_group_id(group)}/{number % GROUP_SIZE}/0",
            "session_id": _make_session_id(number),
            "group_id": _make_group_id(group),
            "step": group // GROUPS_PER_STEP + 1,
        }


def _make_tags(shape: StoreShape) -> Iterator[dict[str, Any]]:
    row = {"run_id": RUN, "value": "", "reason": "", "author": "bench", "created_at": 1.0}
    for number in range(0, shape.sessions, 2):
        yield row | {"session_id": _make_session_id(number), "name": "quality", "value": "good"}
    for number in range(100):
        yield row | {"session_id": _make_session_id(number), "name": "rare"}
