"""Queries that delete the data of sessions, and find the sessions to delete.

Deleting a session removes its row and everything that belongs to it. A row of `forgotten_sessions` and the
claims remain, which contain no text: they show which policy versions were trained on the session. Because the
session's row is gone, every later write for the session fails, whichever process attempts it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from instar.store.database import Database
from instar.store.models import (
    JUDGED_TAG,
    RESAMPLED_TAG,
    ForgetCause,
    ForgottenSession,
    TrainedSession,
    make_resampled_group_id,
)
from instar.store.rows import FORGOTTEN_ROWS, TRAINED_ROWS
from instar.store.schema import FORGOTTEN_SESSIONS
from instar.types import Channel, ClaimOutcome, GroupStatus, SessionStatus, StepState

_CHILD_TABLES = ("feedback", "tags", "scores", "rewards", "shadow_replies", "session_users", "calls")
"""The tables whose rows refer to a session."""
_JUDGMENT_KEY_BYTES = 16


# --- finding sessions ---------------------------------------------------------------------------


def get_session_ids(
    db: Database, run_id: str, *, agent_id: str | None = None, user_id: str | None = None
) -> list[str]:
    """Return the ids of the run's sessions of an agent, of a user, or of both, oldest first."""
    condition, values = "s.run_id = ?", [run_id]
    if agent_id is not None:
        condition, values = f"{condition} AND s.agent_id = ?", [*values, agent_id]
    if user_id is not None:
        condition += (
            " AND s.session_id IN (SELECT session_id FROM session_users WHERE run_id = ? AND user_id = ?)"
        )
        values += [run_id, user_id]
    rows = db.execute(f"SELECT s.session_id FROM sessions s WHERE {condition} ORDER BY s.seq", values)
    return [row["session_id"] for row in rows]


def get_expired_sessions(
    db: Database,
    run_id: str,
    *,
    max_age: float | None,
    max_sessions: int | None,
    min_age: float,
    keep_checkpoints: int,
    limit: int,
) -> list[str]:
    """Return up to ``limit`` sessions that ended more than ``max_age`` seconds ago, or that are not among the
    newest ``max_sessions``, oldest first.

    Sessions that may still be needed are left out: open ones and those that ended less than ``min_age``
    seconds ago, exported data, sessions of groups that are not completely trained on or dropped, sessions of
    steps that are not in all of the last ``keep_checkpoints`` checkpoints, and evaluations while one is in
    progress.
    """
    now = time.time()
    ended_before, opened_before = 0.0 if max_age is None else now - max_age, 0.0
    if max_sessions is not None:
        sql = "SELECT created_at FROM sessions WHERE run_id = ? ORDER BY created_at DESC LIMIT 1 OFFSET ?"
        oldest_kept = db.execute(sql, (run_id, max_sessions - 1)).fetchone()
        opened_before = 0.0 if oldest_kept is None else oldest_kept["created_at"]
    is_unsaved, saved_values = _build_unsaved_condition(db, run_id, keep_checkpoints)
    rows = db.execute(
        f"""
        SELECT s.session_id FROM sessions s
        WHERE s.run_id = :run_id AND s.created_at < :last_opened AND s.status != :open AND s.channel != :data
          AND (s.ended_at < :ended_before OR s.created_at < :opened_before) AND s.ended_at < :last_ended
          AND NOT EXISTS (
            SELECT 1 FROM groups g
            WHERE g.group_id = s.group_id AND g.run_id = s.run_id AND g.channel = s.channel
              AND g.consumed = 0 AND NOT (g.channel = :val AND g.status = :ready))
          AND NOT EXISTS (
            SELECT 1 FROM claims c LEFT JOIN steps t ON t.policy_id = c.policy_id AND t.step = c.step
            WHERE c.session_id = s.session_id AND c.step IS NOT NULL
              AND (COALESCE(t.state, '') != :committed OR ({is_unsaved})))
          AND (s.channel != :val OR NOT EXISTS (
            SELECT 1 FROM groups v
            WHERE v.run_id = s.run_id AND v.channel = :val AND v.status IN (:group_open, :scoring)))
        ORDER BY s.created_at, s.seq LIMIT :limit""",
        saved_values
        | {
            "run_id": run_id,
            "last_opened": max(ended_before, opened_before),
            "ended_before": ended_before,
            "opened_before": opened_before,
            "last_ended": now - min_age,
            "open": SessionStatus.OPEN.value,
            "data": Channel.DATA.value,
            "val": Channel.VAL.value,
            "ready": GroupStatus.READY.value,
            "group_open": GroupStatus.OPEN.value,
            "scoring": GroupStatus.SCORING.value,
            "committed": StepState.COMMITTED.value,
            "limit": limit,
        },
    )
    return [row["session_id"] for row in rows]


def _build_unsaved_condition(
    db: Database, run_id: str, keep_checkpoints: int
) -> tuple[str, dict[str, object]]:
    """Return a condition with its values that is true if the claim ``c`` belongs to a step of the run that is
    not in all of the last checkpoints of its policy."""
    saved_steps = _get_last_steps_in_checkpoints(db, run_id, keep_checkpoints)
    values: dict[str, object] = {}
    for number, (policy_id, step) in enumerate(saved_steps.items()):
        values |= {f"policy{number}": policy_id, f"saved{number}": step}
    conditions = [f"(c.policy_id = :policy{n} AND c.step > :saved{n})" for n in range(len(saved_steps))]
    return " OR ".join(conditions) or "1 = 0", values


def _get_last_steps_in_checkpoints(db: Database, run_id: str, keep_checkpoints: int) -> dict[str, int]:
    """Return for each policy of the run the last step whose update is in all of its last
    ``keep_checkpoints`` checkpoints, or 0. If newer checkpoints are damaged, the trainer resumes from it and
    repeats the later steps."""
    rows = db.execute(
        "SELECT policy_id, step, state, state_path FROM steps WHERE run_id = ? ORDER BY policy_id, step DESC",
        (run_id,),
    )
    steps: dict[str, list[int]] = {}
    for row in rows:
        saved = steps.setdefault(row["policy_id"], [])
        if row["state"] == StepState.COMMITTED.value and row["state_path"] is not None:
            saved.append(row["step"])
    return {policy_id: min(saved[:keep_checkpoints], default=0) for policy_id, saved in steps.items()}


def get_trained_sessions(db: Database, session_ids: Sequence[str]) -> list[TrainedSession]:
    """Return the steps that trained on these sessions or on further replies to their prompts, also if the
    sessions' data was deleted."""
    array, group_ids = db.json_array_sql.format("?"), list(map(make_resampled_group_id, session_ids))
    return TRAINED_ROWS.select(
        db,
        "SELECT c.session_id, c.run_id, c.policy_id, c.step, t.state, t.version, COUNT(*) AS samples "
        "FROM claims c JOIN steps t ON t.policy_id = c.policy_id AND t.step = c.step "
        f"WHERE (c.session_id IN ({array}) OR c.group_id IN ({array})) AND c.outcome = ? "
        "GROUP BY c.session_id, c.run_id, c.policy_id, c.step, t.state, t.version "
        "ORDER BY c.run_id, c.policy_id, c.step, c.session_id",
        (json.dumps(list(session_ids)), json.dumps(group_ids), ClaimOutcome.TRAINED.value),
    )


def get_forgotten_sessions(db: Database, session_ids: Sequence[str]) -> list[ForgottenSession]:
    return FORGOTTEN_ROWS.select(
        db,
        "SELECT * FROM forgotten_sessions "
        f"WHERE session_id IN ({db.json_array_sql.format('?')}) ORDER BY seq",
        (json.dumps(list(session_ids)),),
    )


def lock_and_find_forgotten(db: Database, session_ids: Iterable[str]) -> frozenset[str]:
    """Return those of the sessions whose data was deleted. The data of the others cannot be deleted before
    the transaction ends, so whoever deletes it later finds what the transaction stored."""
    values = (json.dumps(sorted(session_ids)),)
    in_ids = f"IN ({db.json_array_sql.format('?')})"
    if db.for_update:
        db.execute(
            f"SELECT 1 FROM sessions WHERE session_id {in_ids} ORDER BY session_id{db.for_update}", values
        )
    rows = db.execute(f"SELECT session_id FROM forgotten_sessions WHERE session_id {in_ids}", values)
    return frozenset(row["session_id"] for row in rows)


class ForgottenPage(NamedTuple):
    last_seq: int
    """The value of ``after`` with which the next page begins."""
    session_ids: list[str]


def get_forgotten_after(db: Database, run_id: str, after: int | None) -> ForgottenPage:
    """Return the sessions that were deleted after the position ``after``. If it is None, return only the
    current position."""
    if after is None:
        row = db.execute(
            "SELECT MAX(seq) AS seq FROM forgotten_sessions WHERE run_id = ?", (run_id,)
        ).fetchone()
        return ForgottenPage(row["seq"] or 0, [])
    rows = db.execute(
        "SELECT seq, session_id FROM forgotten_sessions WHERE run_id = ? AND seq > ? ORDER BY seq",
        (run_id, after),
    ).fetchall()
    return ForgottenPage(rows[-1]["seq"] if rows else after, [row["session_id"] for row in rows])


# --- deleting -----------------------------------------------------------------------------------


def forget_sessions(
    db: Database, run_id: str, session_ids: Sequence[str], cause: ForgetCause = "request"
) -> list[str]:
    """Delete the data of these sessions, and return the ids of the deleted ones. Sessions of an open group
    are not deleted, because a rollout is using them. The sessions in which the run's own model judged these
    are deleted, too; their ids are not returned."""
    # One at a time, so that the rows of `forgotten_sessions` become visible in the order of their numbers.
    db.lock_name("forgotten sessions")
    sessions = db.execute(
        f"SELECT s.* FROM sessions s WHERE s.session_id IN ({db.json_array_sql.format('?')}) "
        "AND s.run_id = ? AND NOT EXISTS (SELECT 1 FROM groups g WHERE g.group_id = s.group_id "
        "AND g.run_id = s.run_id AND g.channel = s.channel AND g.status = ?) "
        f"ORDER BY s.session_id{db.for_delete}",
        (json.dumps(list(session_ids)), run_id, GroupStatus.OPEN.value),
    ).fetchall()
    requested_ids = [row["session_id"] for row in sessions]
    if not requested_ids:
        return []
    related = _find_related_sessions(db, run_id, requested_ids)
    sessions += _select_questions(db, run_id, related, requested_ids)
    ids = [row["session_id"] for row in sessions]
    in_ids = f"IN ({db.json_array_sql.format('?')})"
    values = (json.dumps(ids),)
    counts = {
        row["session_id"]: row
        for row in db.execute(
            "SELECT session_id, COUNT(*) AS calls, CAST(SUM(sampled_tokens) AS BIGINT) AS sampled_tokens, "
            f"MAX(seq) AS last_call FROM calls WHERE session_id {in_ids} GROUP BY session_id",
            values,
        )
    }
    db.insert(
        FORGOTTEN_SESSIONS, [_build_forgotten_row(s, counts.get(s["session_id"]), cause) for s in sessions]
    )
    rows = db.execute(
        f"SELECT DISTINCT tools_hash FROM calls WHERE session_id {in_ids} AND tools_hash IS NOT NULL", values
    )
    tools = [row["tools_hash"] for row in rows]
    _clear_comparisons(db, related)
    # Only a changed status is counted; otherwise, the sessions would be counted as open forever.
    db.execute(
        f"UPDATE sessions SET status = ? WHERE session_id {in_ids} AND status = ?",
        (SessionStatus.ABANDONED.value, *values, SessionStatus.OPEN.value),
    )
    _delete_comparisons_of_replies(db, ids)
    for table in (*_CHILD_TABLES, "sessions"):
        db.execute(f"DELETE FROM {table} WHERE session_id {in_ids}", values)
    if db.for_delete:
        # Wait for writers that refer to the tools, so that the DELETE sees their calls.
        db.execute(
            f"SELECT 1 FROM tools WHERE hash {in_ids} ORDER BY hash{db.for_delete}", (json.dumps(tools),)
        )
    db.execute(
        f"DELETE FROM tools WHERE hash {in_ids} "
        "AND NOT EXISTS (SELECT 1 FROM calls WHERE calls.tools_hash = tools.hash)",
        (json.dumps(tools),),
    )
    _clear_tasks(db, {row["group_id"] for row in sessions} - {None})
    return requested_ids


def _build_forgotten_row(session: Any, counts: Any, cause: ForgetCause) -> tuple[object, ...]:
    names = ("session_id", "run_id", "agent_id", "policy_id", "channel", "group_id", "created_at")
    return FORGOTTEN_SESSIONS.to_values(
        {
            **{name: session[name] for name in names},
            "calls": counts["calls"] if counts else 0,
            "sampled_tokens": counts["sampled_tokens"] if counts else 0,
            "last_call": counts["last_call"] if counts else None,
            "cause": cause,
            "forgotten_at": time.time(),
        }
    )


def _find_related_sessions(db: Database, run_id: str, session_ids: Sequence[str]) -> list[str]:
    """Return these sessions, those that repeat a prompt of them, and those in the same groups, because a
    judge that compared them quotes all."""
    array, ids = db.json_array_sql.format("?"), json.dumps(list(session_ids))
    rows = db.execute(
        "SELECT session_id FROM sessions WHERE group_id IN (SELECT group_id FROM sessions "
        f"WHERE session_id IN ({array}) AND group_id IS NOT NULL) UNION ALL "
        f"SELECT session_id FROM tags WHERE run_id = ? AND name = ? AND value IN ({array})",
        (ids, run_id, RESAMPLED_TAG, ids),
    )
    return sorted({*session_ids, *(row["session_id"] for row in rows)})


def _select_questions(
    db: Database, run_id: str, judged_ids: Sequence[str], known: Sequence[str]
) -> list[Any]:
    """Return the sessions, other than the ``known`` ones, in which the run's own model judged one of the
    sessions ``judged_ids``, or which repeat a prompt of them. They contain these sessions' texts."""
    array = db.json_array_sql.format("?")
    return db.execute(
        "SELECT s.* FROM sessions s WHERE s.session_id IN (SELECT session_id FROM tags "
        f"WHERE run_id = ? AND name IN (?, ?) AND value IN ({array})) AND s.session_id NOT IN ({array}) "
        f"ORDER BY s.session_id{db.for_delete}",
        (run_id, JUDGED_TAG, RESAMPLED_TAG, json.dumps(list(judged_ids)), json.dumps(list(known))),
    ).fetchall()


def _delete_comparisons_of_replies(db: Database, session_ids: Sequence[str]) -> None:
    """Delete the feedback that compares a reply with one of these sessions, whose tokens it contains."""
    db.execute(
        "DELETE FROM feedback WHERE other_call_id IN "
        f"(SELECT call_id FROM calls WHERE session_id IN ({db.json_array_sql.format('?')}))",
        (json.dumps(list(session_ids)),),
    )


def _clear_comparisons(db: Database, session_ids: Sequence[str]) -> None:
    """Remove the text of judges about these sessions. The rows stay, because their costs count towards the
    judge's budget."""
    in_ids = f"IN ({db.json_array_sql.format('?')})"
    related = json.dumps(list(session_ids))
    db.execute(
        f"UPDATE rewards SET detail = '{{}}' WHERE source = 'judge' AND session_id {in_ids}", (related,)
    )
    # The key is a hash of the question, which contains the session's text.
    keys = db.execute(f"SELECT key FROM judgments WHERE session_id {in_ids}", (related,)).fetchall()
    for row in keys:
        db.execute(
            "UPDATE judgments SET key = ?, answer = '{}', session_id = NULL WHERE key = ?",
            (os.urandom(_JUDGMENT_KEY_BYTES), row["key"]),
        )


def _clear_tasks(db: Database, group_ids: set[str]) -> None:
    """Remove the tasks of those groups that have no session left."""
    db.execute(
        f"UPDATE groups SET task_data = '{{}}' WHERE group_id IN ({db.json_array_sql.format('?')}) "
        "AND NOT EXISTS (SELECT 1 FROM sessions s WHERE s.group_id = groups.group_id)",
        (json.dumps(sorted(group_ids)),),
    )
