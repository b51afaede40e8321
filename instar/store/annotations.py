"""SQL of what was said of sessions: scores, tags, feedback, a judge's answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from instar.errors import StoreError
from instar.store.base import CORRECTION_KEY_PREFIX, UnscoredSession
from instar.store.codec import DatabaseRow, dump_json, load_json, sanitize_text
from instar.store.database import Database
from instar.store.rows import decode_reward, decode_session
from instar.store.schema import FEEDBACK
from instar.store.sessions import add_rewards
from instar.types import (
    UNTRAINABLE,
    Channel,
    Feedback,
    GroupStatus,
    Json,
    Reward,
    Score,
    ScoreState,
    SessionStatus,
    Tag,
)

AT_ONCE = 500
"""Sessions that one query asks for."""


class HasSessionId(Protocol):
    @property
    def session_id(self) -> str: ...


T = TypeVar("T", bound=HasSessionId)


def get_rewards_of(db: Database, session_ids: Sequence[str]) -> dict[str, list[Reward]]:
    return _by_session(db, "rewards", "seq", session_ids, decode_reward)


def _by_session(
    db: Database, table: str, order: str, session_ids: Sequence[str], decode: Callable[[DatabaseRow], T]
) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {session_id: [] for session_id in session_ids}
    for start in range(0, len(session_ids), AT_ONCE):
        part = list(session_ids[start : start + AT_ONCE])
        marks = ", ".join("?" * len(part))
        rows = db.execute(f"SELECT * FROM {table} WHERE session_id IN ({marks}) ORDER BY {order}", part)
        for row in rows:
            found[row["session_id"]].append(decode(row))
    return found


# --- scores -------------------------------------------------------------------------------------


def unscored(
    db: Database,
    run_id: str,
    scorer: str,
    channels: Sequence[Channel],
    after: int,
    limit: int,
    awaited: bool,
) -> list[UnscoredSession]:
    marks = ", ".join("?" * len(channels))
    where, values = "scorer = ?", list[Any]([scorer])
    waiting = ""
    if awaited:
        versions = scorer.partition("@")[0] + "@"
        where = f"(scorer = ? OR substr(scorer, 1, {len(versions)}) = ?)"
        values = [scorer, versions]
        waiting = "AND NOT EXISTS (SELECT 1 FROM groups WHERE group_id = s.group_id AND status IN (?, ?))"
        values += [GroupStatus.READY.value, GroupStatus.DROPPED.value]
    rows = db.execute(
        f"SELECT * FROM sessions s WHERE run_id = ? AND channel IN ({marks}) AND status = ? AND seq > ? "
        f"AND NOT EXISTS (SELECT 1 FROM scores WHERE scores.session_id = s.session_id AND {where}) "
        f"{waiting} ORDER BY seq LIMIT ?",
        (run_id, *(c.value for c in channels), SessionStatus.COMPLETED.value, after, *values, limit),
    )
    return [UnscoredSession(row["seq"], decode_session(row)) for row in rows]


def settled(db: Database, run_id: str, channels: Sequence[Channel]) -> int:
    # In this order: what is opened between the two lies behind the first.
    last = db.execute("SELECT MAX(seq) AS seq FROM sessions").fetchone()["seq"] or 0
    for channel in channels:
        oldest = db.execute(
            "SELECT MIN(seq) AS seq FROM sessions WHERE run_id = ? AND channel = ? AND status = ?",
            (run_id, channel.value, SessionStatus.OPEN.value),
        ).fetchone()["seq"]
        last = last if oldest is None else min(last, oldest - 1)
    return last


def record_scores(db: Database, scores: Sequence[Score], rewards: Sequence[dict[str, Any]]) -> bool:
    for score in scores:
        there = db.execute(
            "SELECT 1 FROM scores WHERE session_id = ? AND scorer = ?", (score.session_id, score.scorer)
        )
        if there.fetchone() is not None:
            return False
    _add_scores(db, scores)
    add_rewards(db, rewards)
    return True


def end_scored(db: Database, end: Callable[[Database], bool], scores: Sequence[Score]) -> bool:
    """``end`` a session, and with it what it was scored by."""
    if not end(db):
        return False
    _add_scores(db, scores)
    return True


def _add_scores(db: Database, scores: Sequence[Score]) -> None:
    for score in scores:
        done = db.execute(
            "INSERT INTO scores (session_id, scorer, run_id, state, attempts, reason, created_at) "
            "SELECT session_id, ?, run_id, ?, ?, ?, ? FROM sessions WHERE session_id = ?",
            (
                score.scorer,
                score.state.value,
                score.attempts,
                sanitize_text(score.reason),
                score.created_at or time.time(),
                score.session_id,
            ),
        )
        _require(done.rowcount, score.session_id, "score")


def get_scores(db: Database, session_ids: Sequence[str]) -> dict[str, list[Score]]:
    return _by_session(db, "scores", "scorer", session_ids, _decode_score)


def score_counts(db: Database, run_id: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    rows = db.execute(
        "SELECT scorer, state, COUNT(*) AS n FROM scores WHERE run_id = ? GROUP BY scorer, state "
        "ORDER BY scorer, state",
        (run_id,),
    )
    for row in rows:
        found.setdefault(row["scorer"], {})[row["state"]] = row["n"]
    return found


def _decode_score(row: DatabaseRow) -> Score:
    return Score(
        session_id=row["session_id"],
        scorer=row["scorer"],
        state=ScoreState(row["state"]),
        attempts=row["attempts"],
        reason=row["reason"],
        created_at=row["created_at"],
    )


# --- tags ---------------------------------------------------------------------------------------


def add_tags(db: Database, tags: Sequence[Tag]) -> None:
    for tag in tags:
        done = db.execute(
            "INSERT INTO tags (session_id, name, run_id, value, reason, author, created_at) "
            "SELECT session_id, ?, run_id, ?, ?, ?, ? FROM sessions WHERE session_id = ? "
            "ON CONFLICT (session_id, name) DO UPDATE SET value = excluded.value, "
            "reason = excluded.reason, author = excluded.author, created_at = excluded.created_at",
            (
                tag.name,
                sanitize_text(tag.value),
                sanitize_text(tag.reason),
                sanitize_text(tag.author),
                tag.created_at or time.time(),
                tag.session_id,
            ),
        )
        _require(done.rowcount, tag.session_id, "tag")


def remove_tags(db: Database, session_ids: Sequence[str], name: str) -> int:
    return sum(
        db.execute("DELETE FROM tags WHERE session_id = ? AND name = ?", (session_id, name)).rowcount
        for session_id in session_ids
    )


def get_tags(db: Database, session_ids: Sequence[str]) -> dict[str, list[Tag]]:
    return _by_session(db, "tags", "name", session_ids, _decode_tag)


def _decode_tag(row: DatabaseRow) -> Tag:
    names = ("session_id", "name", "value", "reason", "author", "created_at")
    return Tag(**{name: row[name] for name in names})


# --- feedback -----------------------------------------------------------------------------------


def add_feedback(db: Database, feedback: Feedback, rewards: Sequence[dict[str, Any]]) -> bool:
    there = db.execute("SELECT 1 FROM feedback WHERE feedback_id = ?", (feedback.feedback_id,))
    if there.fetchone() is not None:
        return False
    session = db.execute(
        "SELECT run_id FROM sessions WHERE session_id = ?", (feedback.session_id,)
    ).fetchone()
    _require(int(session is not None), feedback.session_id, "comment on")
    assert session is not None
    ids = feedback.correction_ids
    db.execute(
        FEEDBACK.insert,
        {
            "feedback_id": feedback.feedback_id,
            "session_id": feedback.session_id,
            "run_id": session["run_id"],
            "call_id": feedback.call_id,
            "thumbs": feedback.thumbs,
            "score": feedback.score,
            "text": sanitize_text(feedback.text),
            "correction": sanitize_text(feedback.correction),
            "correction_ids": None if ids is None else ids.astype("<i4").tobytes(),
            "author": sanitize_text(feedback.author),
            "created_at": feedback.created_at or time.time(),
        },
    )
    add_rewards(db, rewards)
    return True


def get_feedback(db: Database, run_id: str, session_id: str | None, corrected: bool) -> list[Feedback]:
    where, values = "run_id = ?", [run_id]
    if session_id is not None:
        where += " AND session_id = ?"
        values.append(session_id)
    if corrected:
        where += " AND correction IS NOT NULL"
    rows = db.execute(f"SELECT * FROM feedback WHERE {where} ORDER BY seq", values)
    return [_decode_feedback(row) for row in rows]


def get_lessons(db: Database, run_id: str, epoch: int, limit: int) -> list[Feedback]:
    rows = db.execute(
        "SELECT f.* FROM feedback f JOIN sessions s ON s.session_id = f.session_id "
        "WHERE f.run_id = ? AND f.correction_ids IS NOT NULL AND s.channel != ? "
        "AND NOT EXISTS (SELECT 1 FROM tags t WHERE t.session_id = f.session_id AND t.name = ?) "
        "AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.run_id = f.run_id AND c.epoch = ? "
        "AND c.sample_key = ? || f.feedback_id) ORDER BY f.seq LIMIT ?",
        (run_id, Channel.VAL.value, UNTRAINABLE, epoch, CORRECTION_KEY_PREFIX, limit),
    )
    return [_decode_feedback(row) for row in rows]


def _decode_feedback(row: DatabaseRow) -> Feedback:
    names = ("feedback_id", "session_id", "call_id", "thumbs", "score", "text", "correction", "author")
    ids = row["correction_ids"]
    return Feedback(
        **{name: row[name] for name in names},
        correction_ids=None if ids is None else np.frombuffer(ids, "<i4").astype(np.int32),
        created_at=row["created_at"],
    )


# --- a judge's answers --------------------------------------------------------------------------


def get_judgment(db: Database, key: bytes) -> Json | None:
    row = db.execute("SELECT answer FROM judgments WHERE key = ?", (key,)).fetchone()
    return load_json(row["answer"]) if row else None


def put_judgment(db: Database, key: bytes, run_id: str, answer: Json, cost: float) -> None:
    db.execute(
        "INSERT INTO judgments (key, run_id, answer, cost, created_at) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (key) DO NOTHING",
        (key, run_id, dump_json(answer), cost, time.time()),
    )


def judged(db: Database, run_id: str) -> tuple[int, float]:
    row = db.execute(
        "SELECT COUNT(*) AS n, COALESCE(SUM(cost), 0) AS cost FROM judgments WHERE run_id = ?", (run_id,)
    ).fetchone()
    assert row is not None
    return int(row["n"]), float(row["cost"])


def _require(rows: int, session_id: str, verb: str) -> None:
    if rows == 0:
        raise StoreError(f"there is no session {session_id} to {verb}")
