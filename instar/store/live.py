"""Queries for the live sessions that a run may train on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from instar.store.database import Database
from instar.store.models import FEEDBACK_ID_PREFIX, RESAMPLED_PREFIX
from instar.store.rows import SESSION_ROWS
from instar.types import UNTRAINABLE, Channel, ClaimOutcome, RewardSource, Session, SessionStatus

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
