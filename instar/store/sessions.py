"""SQL of runs, groups, sessions, rewards and endpoints: functions of a connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from instar.errors import StoreError
from instar.store.base import Run
from instar.store.codec import dump_json, load_json, sanitize_text
from instar.store.database import Database
from instar.store.rows import (
    decode_endpoint,
    decode_group,
    decode_reward,
    decode_run,
    decode_session,
    encode_endpoint,
    encode_run,
)
from instar.store.schema import ENDPOINTS, GROUPS, REWARDS, RUNS, SESSIONS
from instar.store.steps import refresh_consumed
from instar.types import Channel, Endpoint, Group, GroupStatus, Json, Reward, Session, SessionStatus

_UPSERT_RUN = (
    f"{RUNS.insert} ON CONFLICT (run_id) DO UPDATE SET policy_id = excluded.policy_id, "
    "config = excluded.config, status = excluded.status, reason = excluded.reason, "
    "created_at = excluded.created_at"
)
_UPSERT_ENDPOINT = (
    f"{ENDPOINTS.insert} ON CONFLICT (run_id, role, name) DO UPDATE SET url = excluded.url, "
    "pid = excluded.pid, doing = excluded.doing, log = excluded.log, heartbeat = excluded.heartbeat"
)
# Run, agent and policy of a reward are its session's.
_INSERT_REWARD = (
    f"INSERT INTO {REWARDS.name} (session_id, run_id, agent_id, policy_id, call_id, value, source, scorer, "
    "detail, created_at, reward_id, scorer_version, cost) SELECT session_id, run_id, agent_id, policy_id, "
    ":call_id, :value, :source, :scorer, :detail, :created_at, :reward_id, :scorer_version, :cost "
    "FROM sessions WHERE session_id = :session_id"
)


def put_run(db: Database, run: Run) -> None:
    row = encode_run(run)
    if not run.created_at:
        there = get_run(db, run.run_id)
        row["created_at"] = there.created_at if there else time.time()
    db.execute(_UPSERT_RUN, row)


def get_run(db: Database, run_id: str) -> Run | None:
    row = db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    return decode_run(row) if row else None


def get_runs(db: Database) -> list[Run]:
    return [decode_run(row) for row in db.execute("SELECT * FROM runs ORDER BY created_at, run_id")]


def open_group(db: Database, row: dict[str, Any]) -> None:
    db.execute(GROUPS.insert, row)
    refresh_consumed(db, [row["group_id"]])


def close_group(db: Database, group_id: str, status: GroupStatus, reason: str | None) -> None:
    done = db.execute(
        "UPDATE groups SET status = ?, reason = ? WHERE group_id = ?",
        (status.value, sanitize_text(reason), group_id),
    )
    if done.rowcount == 0:
        raise StoreError(f"there is no group {group_id}")
    refresh_consumed(db, [group_id])


def get_group(db: Database, group_id: str) -> Group | None:
    row = db.execute("SELECT * FROM groups WHERE group_id = ?", (sanitize_text(group_id),)).fetchone()
    return decode_group(row) if row else None


def get_groups(
    db: Database,
    run_id: str,
    channel: Channel,
    status: GroupStatus | None,
    unclaimed_in_epoch: int | None,
) -> list[Group]:
    where, values = "run_id = ? AND channel = ?", list[Any]([run_id, channel.value])
    if status is not None:
        where += " AND status = ?"
        values.append(status.value)
    if unclaimed_in_epoch is not None:
        # Two ranges of an index: what was claimed in that very epoch, which is nearly all, is not looked at.
        where = (
            f"seq IN (SELECT seq FROM groups WHERE {where} AND claimed_epoch < ? UNION ALL "
            f"SELECT seq FROM groups WHERE {where} AND claimed_epoch > ? AND NOT EXISTS ("
            "SELECT 1 FROM claims WHERE claims.group_id = groups.group_id"
            " AND claims.run_id = groups.run_id AND claims.epoch = ?))"
        )
        values = [*values, unclaimed_in_epoch, *values, unclaimed_in_epoch, unclaimed_in_epoch]
    rows = db.execute(f"SELECT * FROM groups WHERE {where} ORDER BY idx, seq", values)
    return [decode_group(row) for row in rows]


def open_session(db: Database, row: dict[str, Any]) -> None:
    db.execute(SESSIONS.insert, row)


def get_session(db: Database, column: str, value: str) -> Session | None:
    row = db.execute(f"SELECT * FROM sessions WHERE {column} = ?", (sanitize_text(value),)).fetchone()
    return decode_session(row) if row else None


def get_session_by_external(db: Database, run_id: str, agent_id: str, external_id: str) -> Session | None:
    row = db.execute(
        "SELECT * FROM sessions WHERE run_id = ? AND agent_id = ? AND external_id = ? AND status = ? "
        "ORDER BY seq DESC LIMIT 1",
        (run_id, agent_id, sanitize_text(external_id), SessionStatus.OPEN.value),
    ).fetchone()
    return decode_session(row) if row else None


def silent_sessions(db: Database, run_id: str, before: float) -> list[str]:
    rows = db.execute(
        """
        SELECT session_id FROM sessions s WHERE run_id = ? AND channel = ? AND status = ?
          AND COALESCE((SELECT MAX(ended_at) FROM calls WHERE calls.session_id = s.session_id),
            created_at) < ?
        ORDER BY seq""",
        (run_id, Channel.LIVE.value, SessionStatus.OPEN.value, before),
    )
    return [row["session_id"] for row in rows]


def end_session(
    db: Database,
    session_id: str,
    status: SessionStatus,
    reason: str | None,
    rewards: Sequence[dict[str, Any]],
    metadata: Json | None,
) -> bool:
    row = db.execute(
        f"SELECT status, metadata FROM sessions WHERE session_id = ?{db.for_update}", (session_id,)
    ).fetchone()
    if row is None:
        raise StoreError(f"there is no session {session_id}")
    if row["status"] != SessionStatus.OPEN.value:
        return False
    merged = {**load_json(row["metadata"]), **(metadata or {})}
    db.execute(
        "UPDATE sessions SET status = ?, reason = ?, metadata = ?, ended_at = ? WHERE session_id = ?",
        (status.value, sanitize_text(reason), dump_json(merged), time.time(), session_id),
    )
    add_rewards(db, rewards)
    return True


def add_rewards(db: Database, rewards: Sequence[dict[str, Any]]) -> None:
    """Those whose id is there are left as they are."""
    for reward in rewards:
        if _is_there(db, reward["reward_id"]):
            continue
        if db.execute(_INSERT_REWARD, reward).rowcount == 0:
            raise StoreError(f"there is no session {reward['session_id']} to reward")
        if reward["call_id"] is None:
            db.execute("UPDATE sessions SET reward = :value WHERE session_id = :session_id", reward)


def _is_there(db: Database, reward_id: str | None) -> bool:
    if reward_id is None:
        return False
    return db.execute("SELECT 1 FROM rewards WHERE reward_id = ?", (reward_id,)).fetchone() is not None


def get_rewards(db: Database, session_id: str) -> list[Reward]:
    rows = db.execute("SELECT * FROM rewards WHERE session_id = ? ORDER BY seq", (session_id,))
    return [decode_reward(row) for row in rows]


def put_endpoint(db: Database, endpoint: Endpoint) -> None:
    db.execute(_UPSERT_ENDPOINT, encode_endpoint(endpoint))


def get_endpoints(db: Database, run_id: str) -> list[Endpoint]:
    rows = db.execute("SELECT * FROM endpoints WHERE run_id = ? ORDER BY role, name", (run_id,))
    return [decode_endpoint(row) for row in rows]


def remove_endpoint(db: Database, run_id: str, role: str, name: str) -> None:
    db.execute("DELETE FROM endpoints WHERE run_id = ? AND role = ? AND name = ?", (run_id, role, name))
