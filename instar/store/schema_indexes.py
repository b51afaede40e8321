"""The indexes of the store's tables, and the triggers for SQLite."""

from __future__ import annotations

INDEXES_BY_VERSION = {
    1: (
        "CREATE INDEX groups_by_index ON groups (run_id, channel, idx)",
        "CREATE INDEX groups_by_status ON groups (run_id, channel, status, idx)",
        "CREATE INDEX sessions_by_group ON sessions (group_id)",
        "CREATE INDEX rewards_by_session ON rewards (session_id)",
        "CREATE INDEX claims_by_session ON claims (session_id)",
    ),
    2: (
        "CREATE INDEX groups_by_claim ON groups (run_id, channel, status, claimed_epoch)",
        "CREATE INDEX sessions_by_external ON sessions (run_id, agent_id, external_id) "
        "WHERE external_id IS NOT NULL",
        "CREATE INDEX calls_by_session ON calls (session_id, ended_at, sampled_tokens)",
        "CREATE INDEX calls_by_request ON calls (request_id)",
        "CREATE INDEX calls_by_tail ON calls (tail_key) WHERE tail_key IS NOT NULL",
        "CREATE UNIQUE INDEX keys_by_name ON keys (name) WHERE revoked_at IS NULL AND name != ''",
    ),
    4: (
        # A page of sessions is read from this index alone, however few sessions match the filter.
        "CREATE INDEX sessions_by_run ON sessions "
        "(run_id, channel, status, seq, created_at, reward, agent_id)",
        "CREATE INDEX sessions_by_reward ON sessions (run_id, reward) WHERE reward IS NOT NULL",
        "CREATE INDEX sessions_by_time ON sessions (run_id, created_at)",
        "CREATE INDEX sessions_by_task ON sessions (run_id, task_id) WHERE task_id IS NOT NULL",
        "CREATE INDEX rewards_by_scorer ON rewards (run_id, source, scorer)",
        "CREATE UNIQUE INDEX rewards_by_id ON rewards (reward_id) WHERE reward_id IS NOT NULL",
        "CREATE INDEX scores_by_run ON scores (run_id, scorer, state)",
        "CREATE INDEX tags_by_name ON tags (run_id, name, value)",
        "CREATE INDEX feedback_by_session ON feedback (session_id)",
        "CREATE INDEX feedback_by_run ON feedback (run_id)",
        "CREATE INDEX judgments_by_run ON judgments (run_id)",
    ),
    5: (
        "CREATE INDEX session_users_by_user ON session_users (run_id, user_id)",
        "CREATE INDEX forgotten_by_run ON forgotten_sessions (run_id)",
        "CREATE INDEX forgotten_by_last_call ON forgotten_sessions (last_call)",
        "CREATE INDEX judgments_by_session ON judgments (session_id) WHERE session_id IS NOT NULL",
        # Also finds the calls that keep a row of `tools` from being deleted.
        "CREATE INDEX calls_by_tools ON calls (tools_hash) WHERE tools_hash IS NOT NULL",
    ),
    6: (
        # The gateway polls it for the versions that serve.
        "CREATE INDEX policies_by_stage ON policies (policy_id, stage, version)",
        "CREATE INDEX shadow_replies_by_version ON shadow_replies (policy_id, version)",
        "CREATE INDEX shadow_replies_by_session ON shadow_replies (session_id)",
        "CREATE INDEX claims_by_step ON claims (policy_id, step)",
        "CREATE INDEX claims_by_group ON claims (group_id, run_id, epoch)",
        "CREATE INDEX steps_by_state ON steps (run_id, state)",
        "CREATE INDEX feedback_by_other_call ON feedback (other_call_id) WHERE other_call_id IS NOT NULL",
    ),
}
"""The indexes, by the schema version that added or last redefined them."""
INDEXES = tuple(index for indexes in INDEXES_BY_VERSION.values() for index in indexes)


def _build_counting_triggers(
    table: str, counts: str, keys: tuple[str, ...], watched_columns: str
) -> tuple[str, str]:
    new = ", ".join(f"NEW.{key}" for key in keys)
    old = " AND ".join(f"{key} = OLD.{key}" for key in keys)
    add = (
        f"INSERT INTO {counts} ({', '.join(keys)}, n) VALUES ({new}, 1) "
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET n = n + 1;"
    )
    return (
        f"CREATE TRIGGER {table}_counted AFTER INSERT ON {table} BEGIN {add} END",
        f"CREATE TRIGGER {table}_recounted AFTER UPDATE OF {watched_columns} ON {table} BEGIN "
        f"UPDATE {counts} SET n = n - 1 WHERE {old}; {add} END",
    )


TRIGGERS = (
    *_build_counting_triggers(
        "groups", "group_counts", ("run_id", "channel", "status", "consumed"), "status, consumed"
    ),
    *_build_counting_triggers("sessions", "session_counts", ("run_id", "channel", "status"), "status"),
)
