"""Queries for runs, groups, sessions and rewards, and for the processes of a run: endpoints and leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from instar.errors import ConflictError, LeaseLost, SessionNotFound, StoreError
from instar.store.codec import sanitize_text
from instar.store.database import Database
from instar.store.models import ProgressDetails, Run
from instar.store.rows import (
    ENDPOINT_ROWS,
    REWARD_ROWS,
    RUN_ROWS,
    SESSION_ROWS,
    decode_group,
    encode_group,
    encode_reward,
    encode_session,
    match_columns,
)
from instar.store.schema import ENDPOINTS, GROUPS, REWARDS, RUNS, SESSIONS
from instar.store.steps import count_steps, get_progress, refresh_claim_columns
from instar.types import Channel, Endpoint, Group, GroupStatus, Reward, Session, SessionStatus

_UPSERT_RUN = RUNS.insert_sql + RUNS.build_upsert_clause("run_id")
_UPSERT_ENDPOINT = ENDPOINTS.insert_sql + ENDPOINTS.build_upsert_clause("run_id", "role", "name")


def put_run(db: Database, run: Run) -> None:
    row = RUN_ROWS.encode(run)
    if not run.created_at:
        existing = get_run(db, run.run_id)
        row["created_at"] = existing.created_at if existing else time.time()
    db.execute(_UPSERT_RUN, row)


def get_run(db: Database, run_id: str) -> Run | None:
    return RUN_ROWS.select_one(db, "SELECT * FROM runs WHERE run_id = ?", (run_id,))


def get_runs(db: Database) -> list[Run]:
    return RUN_ROWS.select(db, "SELECT * FROM runs ORDER BY created_at, run_id")


def open_group(db: Database, group: Group) -> None:
    db.execute(GROUPS.insert_sql, encode_group(group))
    refresh_claim_columns(db, [group.group_id])


def add_group(db: Database, group: Group, sessions: Sequence[tuple[Session, str]]) -> Group:
    """Open a group as the last one of its run and channel, together with its sessions and their key hashes.
    Return the group with its index."""
    row = db.execute(
        "SELECT MAX(idx) AS idx FROM groups WHERE run_id = ? AND channel = ?",
        (group.run_id, group.channel.value),
    ).fetchone()
    group = replace(group, index=0 if row["idx"] is None else row["idx"] + 1)
    open_group(db, group)
    for session, key_hash in sessions:
        open_session(db, session, key_hash)
    return group


def close_group(db: Database, group_id: str, status: GroupStatus, reason: str | None = None) -> None:
    """Close a group and abandon its open sessions. Raises StoreError if the group does not exist."""
    cursor = db.execute(
        "UPDATE groups SET status = ?, reason = ? WHERE group_id = ?",
        (status.value, sanitize_text(reason), group_id),
    )
    if cursor.rowcount == 0:
        raise StoreError(f"there is no group {group_id}")
    db.execute(
        "UPDATE sessions SET status = ?, reason = 'superseded', ended_at = ? "
        "WHERE group_id = ? AND status = ? "
        "AND (run_id, channel) = (SELECT g.run_id, g.channel FROM groups g WHERE g.group_id = ?)",
        (SessionStatus.ABANDONED.value, time.time(), group_id, SessionStatus.OPEN.value, group_id),
    )
    refresh_claim_columns(db, [group_id])


def get_group(db: Database, group_id: str) -> Group | None:
    row = db.execute("SELECT * FROM groups WHERE group_id = ?", (sanitize_text(group_id),)).fetchone()
    return decode_group(row) if row else None


def get_groups(
    db: Database,
    run_id: str,
    channel: Channel,
    status: GroupStatus | None = None,
    *,
    unclaimed_in_epoch: int | None = None,
    unclaimed_by: str | None = None,
) -> list[Group]:
    """Return the groups in index order. ``unclaimed_in_epoch`` excludes groups with a claim in that epoch, by
    any policy of the run or, if it is set, by the policy ``unclaimed_by``."""
    where, values = match_columns(run_id=run_id, channel=channel.value, status=status and status.value)
    if unclaimed_in_epoch is not None and unclaimed_by is not None:
        where += (
            " AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.group_id = groups.group_id"
            " AND c.run_id = groups.run_id AND c.epoch = ? AND c.policy_id = ?)"
        )
        values = [*values, unclaimed_in_epoch, unclaimed_by]
    elif unclaimed_in_epoch is not None:
        # Reading only two ranges of the index `groups_by_claim` skips the groups whose last claim is in that
        # epoch. Late in a run, these are nearly all groups.
        where = (
            f"seq IN (SELECT seq FROM groups WHERE {where} AND claimed_epoch < ? UNION ALL "
            f"SELECT seq FROM groups WHERE {where} AND claimed_epoch > ? AND NOT EXISTS ("
            "SELECT 1 FROM claims WHERE claims.group_id = groups.group_id"
            " AND claims.run_id = groups.run_id AND claims.epoch = ?))"
        )
        values = [*values, unclaimed_in_epoch, *values, unclaimed_in_epoch, unclaimed_in_epoch]
    rows = db.execute(f"SELECT * FROM groups WHERE {where} ORDER BY idx, seq", values)
    return [decode_group(row) for row in rows]


def get_progress_details(db: Database, run_id: str, epoch: int) -> ProgressDetails:
    """Read all details in one transaction. If a step were released between two reads, neither the step nor
    its groups would be counted."""
    waiting = get_groups(db, run_id, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=epoch)
    return ProgressDetails(get_progress(db, run_id), len(waiting), *count_steps(db, run_id))


def open_session(db: Database, session: Session, key_hash: str | None = None) -> None:
    """Insert a session. Raises ConflictError if the id is taken or the session's group is closed."""
    if session.group_id is not None:
        row = db.execute(
            f"SELECT status FROM groups WHERE group_id = ? AND run_id = ? AND channel = ?{db.for_update}",
            (sanitize_text(session.group_id), session.run_id, session.channel.value),
        ).fetchone()
        if row is not None and row["status"] != GroupStatus.OPEN.value:
            raise ConflictError(f"group {session.group_id} is already closed ({row['status']})")
    db.execute(SESSIONS.insert_sql, encode_session(session, key_hash))


def get_session(db: Database, session_id: str) -> Session | None:
    return SESSION_ROWS.select_one(
        db, "SELECT * FROM sessions WHERE session_id = ?", (sanitize_text(session_id),)
    )


def get_session_by_key(db: Database, key_hash: str) -> Session | None:
    return SESSION_ROWS.select_one(db, "SELECT * FROM sessions WHERE key_hash = ?", (key_hash,))


def get_session_by_external_id(db: Database, run_id: str, agent_id: str, external_id: str) -> Session | None:
    """Return the agent's newest open session with this external id."""
    return SESSION_ROWS.select_one(
        db,
        "SELECT * FROM sessions WHERE run_id = ? AND agent_id = ? AND external_id = ? AND status = ? "
        "ORDER BY seq DESC LIMIT 1",
        (run_id, agent_id, sanitize_text(external_id), SessionStatus.OPEN.value),
    )


class IdleSession(NamedTuple):
    seq: int
    session_id: str


def get_idle_sessions(
    db: Database, run_id: str, before: float, *, after: int = 0, limit: int = 1000
) -> list[IdleSession]:
    """Return the first ``limit`` open live sessions after ``after`` whose last call ended before
    the Unix time ``before``, ordered by ``seq``. For a session without calls, its creation time counts."""
    rows = db.execute(
        """
        SELECT seq, session_id FROM sessions s WHERE run_id = ? AND channel = ? AND status = ? AND seq > ?
          AND COALESCE((SELECT MAX(ended_at) FROM calls WHERE calls.session_id = s.session_id),
            created_at) < ?
        ORDER BY seq LIMIT ?""",
        (run_id, Channel.LIVE.value, SessionStatus.OPEN.value, after, before, limit),
    )
    return [IdleSession(row["seq"], row["session_id"]) for row in rows]


def add_rewards(db: Database, rewards: Sequence[Reward]) -> None:
    """Add rewards. A reward whose ``reward_id`` already exists is skipped."""
    for reward in rewards:
        if has_reward(db, reward.reward_id):
            continue
        row = encode_reward(reward)
        insert_for_session(db, REWARDS.insert_for_session_sql, row)
        if reward.call_id is None:
            db.execute("UPDATE sessions SET reward = :value WHERE session_id = :session_id", row)


def insert_for_session(db: Database, sql: str, row: Mapping[str, Any]) -> None:
    """Execute an INSERT for a session. Raises SessionNotFound if the session does not exist."""
    if db.execute(sql, row).rowcount == 0:
        raise SessionNotFound(f"there is no session {row['session_id']}")


def has_reward(db: Database, reward_id: str | None) -> bool:
    if reward_id is None:
        return False
    return db.execute("SELECT 1 FROM rewards WHERE reward_id = ?", (reward_id,)).fetchone() is not None


def get_rewards(db: Database, session_id: str) -> list[Reward]:
    return REWARD_ROWS.select(db, "SELECT * FROM rewards WHERE session_id = ? ORDER BY seq", (session_id,))


def put_endpoint(db: Database, endpoint: Endpoint) -> None:
    db.execute(_UPSERT_ENDPOINT, ENDPOINT_ROWS.encode(endpoint))


def get_endpoints(db: Database, run_id: str) -> list[Endpoint]:
    return ENDPOINT_ROWS.select(db, "SELECT * FROM endpoints WHERE run_id = ? ORDER BY role, name", (run_id,))


def remove_endpoint(db: Database, run_id: str, role: str, name: str) -> None:
    db.execute("DELETE FROM endpoints WHERE run_id = ? AND role = ? AND name = ?", (run_id, role, name))


# --- leases: of all processes with the same name, only the holder of the latest lease may write ------


def take_lease(db: Database, run_id: str, name: str) -> int:
    """Take the next lease of a process and return its number. Earlier holders can no longer write."""
    row = db.execute(
        "INSERT INTO leases (run_id, name, lease) VALUES (?, ?, 1) "
        "ON CONFLICT (run_id, name) DO UPDATE SET lease = leases.lease + 1 RETURNING lease",
        (run_id, name),
    ).fetchone()
    return int(row["lease"])


def get_lease(db: Database, run_id: str, name: str) -> int:
    """Return the number of the latest lease, or 0 if none was taken."""
    row = db.execute("SELECT lease FROM leases WHERE run_id = ? AND name = ?", (run_id, name)).fetchone()
    return int(row["lease"]) if row else 0


def make_lease_check(run_id: str, name: str, lease: int) -> Callable[[Database], None]:
    """Return a function to call first in each transaction. It locks the lease until the transaction ends, and
    raises LeaseLost if a later lease has been taken."""

    def check_lease(db: Database) -> None:
        row = db.execute(
            f"SELECT lease FROM leases WHERE run_id = ? AND name = ?{db.for_update}", (run_id, name)
        ).fetchone()
        if row is None or row["lease"] != lease:
            raise LeaseLost(f"another process has taken over the {name} of run {run_id!r}")

    return check_lease
