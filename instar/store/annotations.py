"""Queries for annotations (rewards, scores, tags, feedback), ended sessions and a judge's answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from instar.errors import SessionNotFound, StoreError
from instar.store.codec import dump_json, sanitize_text
from instar.store.database import Database
from instar.store.models import FEEDBACK_ID_PREFIX, UnscoredSession
from instar.store.rows import (
    FEEDBACK_ROWS,
    REWARD_ROWS,
    SCORE_ROWS,
    SESSION_ROWS,
    TAG_ROWS,
    RowMapping,
    match_columns,
)
from instar.store.schema import FEEDBACK, SCORES, TAGS
from instar.store.sessions import add_rewards, insert_for_session
from instar.types import UNTRAINABLE, Channel, Feedback, GroupStatus, Json, Reward, Score, SessionStatus, Tag

T = TypeVar("T", Reward, Score, Tag)


def get_rewards_by_session(db: Database, session_ids: Sequence[str]) -> dict[str, list[Reward]]:
    return _select_by_session(db, REWARD_ROWS, "rewards", "seq", session_ids)


def _select_by_session(
    db: Database, mapping: RowMapping[T], table: str, order: str, session_ids: Sequence[str]
) -> dict[str, list[T]]:
    by_session: dict[str, list[T]] = {session_id: [] for session_id in session_ids}
    sql = f"SELECT * FROM {table} WHERE session_id IN ({db.json_array_sql.format('?')}) ORDER BY {order}"
    for annotation in mapping.select(db, sql, (json.dumps(list(by_session)),)):
        by_session[annotation.session_id].append(annotation)
    return by_session


# --- scores -------------------------------------------------------------------------------------


def get_unscored_sessions(
    db: Database,
    run_id: str,
    scorer: str,
    channels: Sequence[Channel],
    *,
    after: int = 0,
    limit: int = 256,
    pending_only: bool = False,
) -> list[UnscoredSession]:
    """Return completed sessions that this scorer has not scored and whose ``seq`` is greater than ``after``,
    oldest first. ``pending_only`` excludes sessions in groups that are ready or dropped, and sessions that
    a different version of the scorer has scored."""
    channel_list = ", ".join(f"'{channel.value}'" for channel in channels)
    scorer_condition, values = "scorer = ?", list[Any]([scorer])
    group_condition = ""
    if pending_only:
        name_prefix = scorer.partition("@")[0] + "@"
        scorer_condition = f"(scorer = ? OR substr(scorer, 1, {len(name_prefix)}) = ?)"
        values = [scorer, name_prefix]
        group_condition = (
            "AND NOT EXISTS (SELECT 1 FROM groups WHERE group_id = s.group_id AND status IN (?, ?))"
        )
        values += [GroupStatus.READY.value, GroupStatus.DROPPED.value]
    rows = db.execute(
        f"SELECT * FROM sessions s WHERE run_id = ? AND channel IN ({channel_list}) AND status = ? "
        "AND seq > ? AND NOT EXISTS "
        f"(SELECT 1 FROM scores WHERE scores.session_id = s.session_id AND {scorer_condition}) "
        f"{group_condition} ORDER BY seq LIMIT ?",
        (run_id, SessionStatus.COMPLETED.value, after, *values, limit),
    )
    return [UnscoredSession(row["seq"], SESSION_ROWS.decode(row)) for row in rows]


def get_seq_before_oldest_open(db: Database, run_id: str, channels: Sequence[Channel]) -> int:
    """Return the highest ``seq`` up to which every session of the run in these channels has ended."""
    last_seq = db.execute("SELECT MAX(seq) AS seq FROM sessions").fetchone()["seq"] or 0
    for channel in channels:
        oldest_open = db.execute(
            "SELECT MIN(seq) AS seq FROM sessions WHERE run_id = ? AND channel = ? AND status = ?",
            (run_id, channel.value, SessionStatus.OPEN.value),
        ).fetchone()["seq"]
        last_seq = last_seq if oldest_open is None else min(last_seq, oldest_open - 1)
    return last_seq


def record_scores(db: Database, scores: Sequence[Score], rewards: Sequence[Reward]) -> bool:
    """Add scores and rewards. Return False and change nothing if one of the scores already exists."""
    for score in scores:
        sql = "SELECT 1 FROM scores WHERE session_id = ? AND scorer = ?"
        if db.execute(sql, (score.session_id, score.scorer)).fetchone() is not None:
            return False
    _add_scores(db, scores)
    add_rewards(db, rewards)
    return True


def end_session(
    db: Database,
    session_id: str,
    status: SessionStatus,
    reason: str | None = None,
    rewards: Sequence[Reward] = (),
    metadata: Json | None = None,
    scores: Sequence[Score] = (),
) -> bool:
    """End an open session with its rewards and scores, and return True. ``metadata`` is merged into the
    session's metadata. If the session has already ended, return False and change nothing. Raises
    SessionNotFound if the session does not exist, and StoreError if ``status`` is open."""
    if status is SessionStatus.OPEN:
        raise StoreError(
            f"cannot end session {session_id} with status open; use completed, failed or abandoned"
        )
    row = db.execute(
        f"SELECT status, metadata FROM sessions WHERE session_id = ?{db.for_update}", (session_id,)
    ).fetchone()
    if row is None:
        raise SessionNotFound(f"there is no session {session_id}")
    if row["status"] != SessionStatus.OPEN.value:
        return False
    merged = {**json.loads(row["metadata"]), **(metadata or {})}
    db.execute(
        "UPDATE sessions SET status = ?, reason = ?, metadata = ?, ended_at = ? WHERE session_id = ?",
        (status.value, sanitize_text(reason), dump_json(merged), time.time(), session_id),
    )
    add_rewards(db, rewards)
    _add_scores(db, scores)
    return True


def complete_sessions(db: Database, session_ids: Sequence[str], reason: str) -> int:
    """Complete the sessions that are still open, and return how many. Deleted sessions are skipped."""
    count = 0
    for session_id in session_ids:
        with suppress(SessionNotFound):
            count += end_session(db, session_id, SessionStatus.COMPLETED, reason)
    return count


def _add_scores(db: Database, scores: Sequence[Score]) -> None:
    for score in scores:
        insert_for_session(db, SCORES.insert_for_session_sql, SCORE_ROWS.encode(score))


def get_scores(db: Database, session_ids: Sequence[str]) -> dict[str, list[Score]]:
    return _select_by_session(db, SCORE_ROWS, "scores", "scorer", session_ids)


def get_reward_counts(db: Database, run_id: str) -> dict[str, int]:
    """Count the run's rewards by source, such as ``human``. Those of resampled replies do not count."""
    rows = db.execute(
        "SELECT source, COUNT(*) AS n FROM rewards WHERE run_id = ? AND session_id NOT IN "
        "(SELECT session_id FROM sessions WHERE run_id = ? AND channel = ?) GROUP BY source ORDER BY source",
        (run_id, run_id, Channel.RESAMPLED.value),
    )
    return {row["source"]: row["n"] for row in rows}


def get_score_counts(db: Database, run_id: str) -> dict[str, dict[str, int]]:
    """Count the run's sessions by scorer and score state."""
    counts: dict[str, dict[str, int]] = {}
    rows = db.execute(
        "SELECT scorer, state, COUNT(*) AS n FROM scores WHERE run_id = ? GROUP BY scorer, state "
        "ORDER BY scorer, state",
        (run_id,),
    )
    for row in rows:
        counts.setdefault(row["scorer"], {})[row["state"]] = row["n"]
    return counts


# --- tags ---------------------------------------------------------------------------------------

_UPSERT_TAG = TAGS.insert_for_session_sql + TAGS.build_upsert_clause("session_id", "name")


def add_tags(db: Database, tags: Sequence[Tag]) -> None:
    """Add tags. A tag replaces an existing tag with the same session and name."""
    for tag in tags:
        insert_for_session(db, _UPSERT_TAG, TAG_ROWS.encode(tag))


def remove_tags(db: Database, session_ids: Sequence[str], name: str) -> int:
    """Remove a tag from these sessions, and return the number of sessions that had it."""
    return sum(
        db.execute("DELETE FROM tags WHERE session_id = ? AND name = ?", (session_id, name)).rowcount
        for session_id in session_ids
    )


def get_tags(db: Database, session_ids: Sequence[str]) -> dict[str, list[Tag]]:
    return _select_by_session(db, TAG_ROWS, "tags", "name", session_ids)


# --- feedback -----------------------------------------------------------------------------------


def add_feedback(db: Database, feedback: Feedback, rewards: Sequence[Reward] = ()) -> bool:
    """Add feedback and its rewards, and return True. If the id exists, return False and change nothing."""
    existing = db.execute("SELECT 1 FROM feedback WHERE feedback_id = ?", (feedback.feedback_id,))
    if existing.fetchone() is not None:
        return False
    insert_for_session(db, FEEDBACK.insert_for_session_sql, FEEDBACK_ROWS.encode(feedback))
    add_rewards(db, rewards)
    return True


def get_feedback(
    db: Database,
    run_id: str,
    *,
    session_id: str | None = None,
    feedback_id: str | None = None,
    after: str | None = None,
    limit: int = sys.maxsize,
    corrected_only: bool = False,
) -> list[Feedback]:
    """Return up to ``limit`` entries of the run's feedback, oldest first, beginning after the entry with the
    id ``after``. ``corrected_only`` excludes feedback without a correction."""
    where, values = match_columns(run_id=run_id, session_id=session_id, feedback_id=feedback_id)
    if after is not None:
        where += " AND seq > (SELECT seq FROM feedback WHERE feedback_id = ?)"
        values.append(after)
    if corrected_only:
        where += " AND correction IS NOT NULL"
    sql = f"SELECT * FROM feedback WHERE {where} ORDER BY seq LIMIT ?"
    return FEEDBACK_ROWS.select(db, sql, [*values, limit])


def get_corrections(
    db: Database, run_id: str, epoch: int, limit: int, live_agents: Sequence[str] = ()
) -> list[Feedback]:
    """Return up to ``limit`` corrections that have token ids and are not claimed in this epoch, oldest
    first. Evaluation sessions, sessions tagged as untrainable, and live sessions of agents that are not in
    ``live_agents``, with further replies to their prompts, are excluded."""
    return _select_unclaimed(db, "f.correction_ids IS NOT NULL", run_id, epoch, limit, live_agents)


def get_preferences(
    db: Database, run_id: str, epoch: int, limit: int, live_agents: Sequence[str] = ()
) -> list[Feedback]:
    """Return up to ``limit`` preferences, like `get_corrections`. Neither of the two sessions may be tagged
    as untrainable."""
    condition = (
        "f.other_ids IS NOT NULL AND NOT EXISTS (SELECT 1 FROM calls o JOIN tags u "
        f"ON u.session_id = o.session_id AND u.name = '{UNTRAINABLE}' WHERE o.call_id = f.other_call_id)"
    )
    return _select_unclaimed(db, condition, run_id, epoch, limit, live_agents)


def _select_unclaimed(
    db: Database, condition: str, run_id: str, epoch: int, limit: int, live_agents: Sequence[str]
) -> list[Feedback]:
    return FEEDBACK_ROWS.select(
        db,
        "SELECT f.* FROM feedback f JOIN sessions s ON s.session_id = f.session_id "
        f"WHERE f.run_id = ? AND {condition} AND s.channel != ? "
        f"AND (s.channel NOT IN (?, ?) OR s.agent_id IN ({db.json_array_sql.format('?')})) "
        "AND NOT EXISTS (SELECT 1 FROM tags t WHERE t.session_id = f.session_id AND t.name = ?) "
        "AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.run_id = f.run_id AND c.epoch = ? "
        "AND c.sample_key = ? || f.feedback_id) ORDER BY f.seq LIMIT ?",
        (
            run_id,
            Channel.VAL.value,
            *(Channel.LIVE.value, Channel.RESAMPLED.value),
            json.dumps(list(live_agents)),
            UNTRAINABLE,
            epoch,
            FEEDBACK_ID_PREFIX,
            limit,
        ),
    )


# --- a judge's answers --------------------------------------------------------------------------


def get_judgment(db: Database, key: bytes) -> Json | None:
    """Return a judge's stored answer, or None. ``key`` is a hash of the question and the settings."""
    row = db.execute("SELECT answer FROM judgments WHERE key = ?", (key,)).fetchone()
    return json.loads(row["answer"]) if row else None


def put_judgment(
    db: Database, key: bytes, run_id: str, answer: Json, cost: float = 0.0, session_id: str | None = None
) -> None:
    """Store a judge's answer about a session, unless there is already an answer with this key, or the
    session's data was deleted."""
    db.execute(
        "INSERT INTO judgments (key, run_id, answer, cost, created_at, session_id) SELECT ?, ?, ?, ?, ?, ? "
        "WHERE NOT EXISTS (SELECT 1 FROM forgotten_sessions WHERE session_id = ?) "
        "ON CONFLICT (key) DO NOTHING",
        (key, run_id, dump_json(answer), cost, time.time(), session_id, session_id),
    )


def get_judgment_totals(db: Database, run_id: str) -> tuple[int, float]:
    """Return the number of the run's judgments and their total cost in dollars."""
    sql = "SELECT COUNT(*) AS n, COALESCE(SUM(cost), 0) AS cost FROM judgments WHERE run_id = ?"
    row = db.execute(sql, (run_id,)).fetchone()
    return int(row["n"]), float(row["cost"])
