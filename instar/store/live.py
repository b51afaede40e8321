"""Queries for live sessions, and for the versions that serve them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from instar.store.codec import load_message
from instar.store.database import Database
from instar.store.models import FEEDBACK_ID_PREFIX, RESAMPLED_PREFIX, ActiveVersion, ShadowPair, ShadowReply
from instar.store.policies import decode_policy
from instar.store.rows import SESSION_ROWS, SHADOW_ROWS
from instar.store.schema import SHADOW_REPLIES
from instar.store.sessions import insert_for_session
from instar.types import (
    UNTRAINABLE,
    Channel,
    ClaimOutcome,
    PolicyStage,
    PolicyState,
    RewardSource,
    Session,
    SessionStatus,
)

REWARD_OVERLAP = 256
"""So many earlier rewards are read again, because a PostgreSQL server may commit rewards out of order."""


def get_replayable_sessions(
    db: Database,
    run_id: str,
    agent_ids: Sequence[str],
    epoch: int,
    *,
    steps: Sequence[int],
    min_advantage: float,
    limit: int,
) -> list[Session]:
    """Return the agents' live sessions that one of ``steps`` trained on in epoch 0 with an advantage above
    ``min_advantage``, and that have no claim in ``epoch``. The oldest session is first. Sessions that are
    tagged as untrainable are excluded."""
    return SESSION_ROWS.select(
        db,
        f"""
        SELECT * FROM sessions s
        WHERE s.run_id = :run AND s.channel = :live
          AND s.agent_id IN ({db.json_array_sql.format(":agents")})
          AND s.session_id IN (SELECT session_id FROM claims
            WHERE run_id = :run AND step IN ({db.json_array_sql.format(":steps")}) AND epoch = 0
              AND outcome = :trained AND advantage > :advantage
              AND substr(sample_key, 1, {len(FEEDBACK_ID_PREFIX)}) != :feedback)
          AND NOT EXISTS (SELECT 1 FROM claims c
            WHERE c.session_id = s.session_id AND c.run_id = :run AND c.epoch = :epoch)
          AND NOT EXISTS (SELECT 1 FROM tags t WHERE t.session_id = s.session_id AND t.name = :tag)
        ORDER BY s.seq LIMIT :limit""",
        {
            "run": run_id,
            "live": Channel.LIVE.value,
            "agents": json.dumps(list(agent_ids)),
            "steps": json.dumps(list(steps)),
            "trained": ClaimOutcome.TRAINED.value,
            "advantage": min_advantage,
            "feedback": FEEDBACK_ID_PREFIX,
            "epoch": epoch,
            "tag": UNTRAINABLE,
            "limit": limit,
        },
    )


class RewardedSessions(NamedTuple):
    sessions: list[Session]
    last_reward: int
    """The number of the newest reward, with which the next query continues."""


def get_rewarded_live_sessions(
    db: Database,
    run_id: str,
    agent_ids: Sequence[str],
    epoch: int,
    *,
    after_reward: int = 0,
    session_ids: Sequence[str] = (),
) -> RewardedSessions:
    """Return the agents' live sessions that have no claim in the epoch, and have a reward after
    ``after_reward`` or an id in ``session_ids``. The oldest session is first. Rewards with the source
    ``fallback`` and claims on corrections do not count."""
    last = db.execute("SELECT MAX(seq) AS seq FROM rewards").fetchone()["seq"] or 0
    sessions = SESSION_ROWS.select(
        db,
        f"""
        SELECT * FROM sessions s WHERE s.session_id IN (
            SELECT session_id FROM rewards WHERE seq > :after AND run_id = :run AND source != :fallback
            UNION ALL SELECT session_id FROM sessions
            WHERE session_id IN ({db.json_array_sql.format(":ids")}))
          AND s.run_id = :run AND s.channel = :live
          AND s.agent_id IN ({db.json_array_sql.format(":agents")})
          AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.session_id = s.session_id AND c.run_id = :run
            AND c.epoch = :epoch AND substr(c.sample_key, 1, {len(FEEDBACK_ID_PREFIX)}) != :feedback)
        ORDER BY s.seq""",
        {
            "after": after_reward - REWARD_OVERLAP,
            "run": run_id,
            "fallback": RewardSource.FALLBACK.value,
            "ids": json.dumps(list(session_ids)),
            "live": Channel.LIVE.value,
            "agents": json.dumps(list(agent_ids)),
            "epoch": epoch,
            "feedback": FEEDBACK_ID_PREFIX,
        },
    )
    return RewardedSessions(sessions, last)


def get_newest_live_sessions(db: Database, run_id: str, agent_ids: Sequence[str], limit: int) -> list[str]:
    """Return the ids of the agents' newest completed live sessions, newest first. Sessions that were trained
    on, because the run had no gate then, are left out."""
    condition = (Channel.LIVE.value, SessionStatus.COMPLETED.value, json.dumps(list(agent_ids)))
    rows = db.execute(
        "SELECT session_id FROM sessions s WHERE run_id = ? AND channel = ? AND status = ? "
        f"AND agent_id IN ({db.json_array_sql.format('?')}) AND NOT EXISTS (SELECT 1 FROM claims c "
        "WHERE c.session_id = s.session_id AND c.outcome = ?) ORDER BY seq DESC LIMIT ?",
        (run_id, *condition, ClaimOutcome.TRAINED.value, limit),
    )
    return [row["session_id"] for row in rows]


# --- the versions that serve live sessions --------------------------------------------------------

_ACTIVE_STAGES = (PolicyStage.SERVING, PolicyStage.CANARY, PolicyStage.SHADOW)


def get_active_versions(db: Database, policy_ids: Sequence[str]) -> list[ActiveVersion]:
    """Return the newest published version of each policy in each of the stages in which versions answer
    requests."""
    stages = ", ".join(f"'{stage.value}'" for stage in _ACTIVE_STAGES)
    newest = (
        "SELECT MAX(n.version) FROM policies n "
        "WHERE n.policy_id = p.policy_id AND n.stage = p.stage AND n.state = ?"
    )
    rows = db.execute(
        f"SELECT p.* FROM policies p WHERE p.policy_id IN ({db.json_array_sql.format('?')}) "
        f"AND p.stage IN ({stages}) AND p.state = ? AND p.version = ({newest}) ORDER BY p.policy_id",
        (json.dumps(list(policy_ids)), PolicyState.PUBLISHED.value, PolicyState.PUBLISHED.value),
    )
    return [ActiveVersion(decode_policy(row), PolicyStage(row["stage"])) for row in rows]


def get_completed_live_sessions(
    db: Database, run_id: str, policy_id: str, since: float, *, until: float | None = None, limit: int = 1000
) -> list[Session]:
    """Return the policy's completed live sessions that were opened from ``since`` until before ``until``, at
    most the newest ``limit`` ones, in the order in which they were opened."""
    sessions = SESSION_ROWS.select(
        db,
        "SELECT * FROM sessions WHERE run_id = ? AND created_at >= ? AND created_at < ? AND policy_id = ? "
        "AND channel = ? AND status = ? ORDER BY created_at DESC, seq DESC LIMIT ?",
        (
            *(run_id, since, math.inf if until is None else until, policy_id),
            *(Channel.LIVE.value, SessionStatus.COMPLETED.value, limit),
        ),
    )
    return sessions[::-1]


def add_shadow_reply(db: Database, reply: ShadowReply) -> None:
    """Add the reply. Raises SessionNotFound if its session was deleted."""
    insert_for_session(db, SHADOW_REPLIES.insert_for_session_sql, SHADOW_ROWS.encode(reply))


def get_shadow_pairs(db: Database, policy_id: str, version: int, limit: int = 1000) -> list[ShadowPair]:
    """Return the newest ``limit`` shadow replies of a version with the replies that were served, oldest
    first."""
    rows = db.execute(
        "SELECT s.*, c.reply AS served_reply, c.finish_reason AS served_finish_reason "
        "FROM shadow_replies s JOIN calls c ON c.call_id = s.call_id "
        "WHERE s.policy_id = ? AND s.version = ? ORDER BY s.seq DESC LIMIT ?",
        (policy_id, version, limit),
    )
    pairs = [
        ShadowPair(SHADOW_ROWS.decode(row), load_message(row["served_reply"]), row["served_finish_reason"])
        for row in rows
    ]
    return pairs[::-1]


def get_unresampled_sessions(
    db: Database, run_id: str, agent_ids: Sequence[str], *, limit: int
) -> list[Session]:
    """Return completed live sessions of the agents that were not resampled yet, oldest first."""
    return SESSION_ROWS.select(
        db,
        f"""
        SELECT * FROM sessions s
        WHERE s.run_id = ? AND s.channel = ? AND s.status = ?
          AND s.agent_id IN ({db.json_array_sql.format("?")})
          AND NOT EXISTS (SELECT 1 FROM groups g WHERE g.group_id = ? || s.session_id)
        ORDER BY s.seq LIMIT ?""",
        (
            run_id,
            Channel.LIVE.value,
            SessionStatus.COMPLETED.value,
            json.dumps(list(agent_ids)),
            RESAMPLED_PREFIX,
            limit,
        ),
    )
