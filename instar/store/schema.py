"""The tables of a store, with SQLite types. `migrations` updates older stores.

A table that stores a dataclass has a column for most of its fields. Wide blobs come after the narrow columns,
so that reading the narrow columns does not touch the blobs. Columns added by a later version come last, where
a migration adds them.
"""

from __future__ import annotations

from instar.store.models import (
    DatasetRow,
    Evaluation,
    EvaluationItem,
    ForgottenSession,
    KeyRow,
    Run,
    ShadowReply,
    StoredReply,
)
from instar.store.table import BLOB, INTEGER, REAL, ROW_NUMBER, SESSION_ID, TEXT, Table, build_columns
from instar.types import Call, Claim, Endpoint, Feedback, Group, Reward, Score, Session, Step, Tag

VERSION = 7
"""The schema version, which SQLite keeps in ``PRAGMA user_version``. Increment it with every change."""

APPLICATION_ID = 0x494E5354
"""The text ``INST`` in ``PRAGMA application_id``, which identifies a file as a store."""


RUNS = Table("runs", build_columns(Run) | {"run_id": "TEXT PRIMARY KEY"})

GROUPS = Table(
    "groups",
    {
        "seq": ROW_NUMBER,
        "group_id": "TEXT NOT NULL UNIQUE",
        "run_id": TEXT,
        "channel": TEXT,
        "idx": INTEGER,
        "size": INTEGER,
        "task_id": TEXT,
        "task_data": TEXT,
        "status": TEXT,
        "reason": "TEXT",
        # Derived from the claims whenever they change (`steps.refresh_claim_columns`), so that progress
        # can be read without reading the claims.
        "consumed": "INTEGER NOT NULL DEFAULT 0",
        "created_at": REAL,
        # The last epoch with a claim by the group's own run, or -1. Derived like `consumed`, so that
        # unclaimed groups are found without reading the claimed ones.
        "claimed_epoch": "INTEGER NOT NULL DEFAULT -1",
        **build_columns(Group, "deadline_seconds"),
    },
    generated=("seq", "consumed", "claimed_epoch"),
    later_columns={"claimed_epoch": 2, "deadline_seconds": 5},
)

SESSIONS = Table(
    "sessions",
    {
        "seq": ROW_NUMBER,
        "session_id": "TEXT NOT NULL UNIQUE",
        **build_columns(Session, "run_id", "agent_id", "policy_id", "channel", "status", "group_id", "slot"),
        **build_columns(Session, "attempt", "task_id", "reason", "seed", "sampling", "metadata"),
        "key_hash": "TEXT UNIQUE",
        **build_columns(Session, "created_at", "ended_at", "external_id"),
        # The latest reward that is not for an individual call, copied from `rewards` to filter sessions.
        "reward": "REAL",
        **build_columns(Session, "canary_version"),
    },
    generated=("seq", "reward"),
    later_columns={"external_id": 2, "reward": 4, "canary_version": 6},
)

TOOLS = Table("tools", {"hash": "TEXT PRIMARY KEY", "body": TEXT})

CALLS = Table(
    "calls",
    {
        "seq": ROW_NUMBER,
        "call_id": "TEXT NOT NULL UNIQUE",
        "session_id": SESSION_ID,
        **build_columns(Call, "run_id", "agent_id", "policy_id", "request_id", "parent_id", "link"),
        **build_columns(Call, "base_id", "base_tokens", "base_messages"),
        # Lengths and checksums of the prompt and of prompt + sampled tokens, to verify a rebuilt call.
        "prompt_tokens": INTEGER,
        "prompt_crc": INTEGER,
        "sampled_tokens": INTEGER,
        "sequence_crc": INTEGER,
        "message_count": INTEGER,
        **build_columns(Call, "status", "trainable", "reason", "finish_reason", "dialect", "params"),
        **build_columns(Call, "started_at", "first_token_at", "ended_at"),
        "tools_hash": "TEXT REFERENCES tools (hash)",
        **build_columns(Call, "versions", "prompt_ids", "sampled_ids", "logprobs", "behavior_logprobs"),
        **build_columns(Call, "messages", "reply"),
        "model": "TEXT NOT NULL DEFAULT ''",
        "client_key": "TEXT",
        "digests": "BLOB NOT NULL DEFAULT x''",
        # A hash of the messages and reply, to find the session of a request that continues this call. Only
        # calls of live sessions have one.
        "tail_key": "BLOB",
        **build_columns(StoredReply, "response_fields"),
    },
    generated=("seq",),
    later_columns={"model": 2, "client_key": 2, "digests": 2, "tail_key": 2, "response_fields": 7},
)

REWARDS = Table(
    "rewards",
    {
        "seq": ROW_NUMBER,
        "session_id": SESSION_ID,
        **build_columns(Session, "run_id", "agent_id", "policy_id"),
        **build_columns(Reward, "call_id", "value", "source", "scorer", "detail", "created_at", "reward_id"),
        "scorer_version": "TEXT NOT NULL DEFAULT ''",
        "cost": "REAL NOT NULL DEFAULT 0",
    },
    generated=("seq",),
    later_columns={"reward_id": 4, "scorer_version": 4, "cost": 4},
)

SCORES = Table(
    "scores",
    {
        "session_id": SESSION_ID,
        "scorer": TEXT,
        "run_id": TEXT,
        **build_columns(Score, "state", "attempts", "reason", "created_at"),
    },
    constraints=("PRIMARY KEY (session_id, scorer)",),
    added_in=4,
)

TAGS = Table(
    "tags",
    {
        "session_id": SESSION_ID,
        "name": TEXT,
        "run_id": TEXT,
        **build_columns(Tag, "value", "reason", "author", "created_at"),
    },
    constraints=("PRIMARY KEY (session_id, name)",),
    added_in=4,
)

FEEDBACK = Table(
    "feedback",
    {
        "seq": ROW_NUMBER,
        "feedback_id": "TEXT NOT NULL UNIQUE",
        "session_id": SESSION_ID,
        "run_id": TEXT,
        **build_columns(Feedback, "call_id", "thumbs", "score", "text", "correction", "correction_ids"),
        **build_columns(Feedback, "author", "created_at"),
        **build_columns(Feedback, "preferred", "other_call_id", "other_text", "other_ids"),
    },
    generated=("seq",),
    added_in=4,
    later_columns={"preferred": 6, "other_call_id": 6, "other_text": 6, "other_ids": 6},
)

# Replies of versions in the stage `shadow`, which nobody has seen. They are not calls of their session, so
# that nothing trains on them, scores them or shows them as part of it.
SHADOW_REPLIES = Table(
    "shadow_replies",
    {
        "seq": ROW_NUMBER,
        "session_id": SESSION_ID,
        "run_id": TEXT,
        **build_columns(ShadowReply, "policy_id", "version", "call_id", "finish_reason", "created_at"),
        **build_columns(ShadowReply, "reply", "sampled_ids", "logprobs"),
    },
    generated=("seq",),
    added_in=6,
)

# The users whom the requests of a session named, so that the data of a user can be found and deleted.
SESSION_USERS = Table(
    "session_users",
    {"session_id": SESSION_ID, "user_id": TEXT, "run_id": TEXT},
    constraints=("PRIMARY KEY (session_id, user_id)",),
    added_in=5,
)

# What is left of deleted sessions. The rows contain no text.
FORGOTTEN_SESSIONS = Table(
    "forgotten_sessions",
    {
        "seq": ROW_NUMBER,
        "session_id": "TEXT NOT NULL UNIQUE",
        **build_columns(ForgottenSession, "run_id", "agent_id", "policy_id", "channel", "group_id"),
        **build_columns(ForgottenSession, "calls", "sampled_tokens", "cause", "created_at", "forgotten_at"),
        # The row number of the session's last call. The next call of any session may get the same number.
        "last_call": "INTEGER",
    },
    generated=("seq",),
    added_in=5,
)

# A judge's answers by question, so that the same question is not paid for twice.
JUDGMENTS = Table(
    "judgments",
    {
        "key": "BLOB PRIMARY KEY",
        "run_id": TEXT,
        "answer": TEXT,
        "cost": REAL,
        "created_at": REAL,
        # The session for which the question was asked.
        "session_id": "TEXT",
    },
    added_in=4,
    later_columns={"session_id": 5},
)

DATASETS = Table(
    "datasets", build_columns(DatasetRow), constraints=("PRIMARY KEY (name, version)",), added_in=4
)

POLICIES = Table(
    "policies",
    {
        "policy_id": TEXT,
        "version": INTEGER,
        "run_id": TEXT,
        "step": INTEGER,
        "state": TEXT,
        "artifact_kind": "TEXT",
        "artifact_path": "TEXT",
        "expires_at": "REAL",
        "reason": "TEXT",
        "updated_at": REAL,
        "parent": "INTEGER",
        "stage": "TEXT NOT NULL DEFAULT 'serving'",
        "promoted_at": "REAL",
    },
    constraints=("PRIMARY KEY (policy_id, version)",),
    later_columns={"parent": 5, "stage": 5, "promoted_at": 5},
)

STEPS = Table(
    "steps",
    build_columns(Step) | {"run_id": "TEXT NOT NULL DEFAULT ''"},
    constraints=("PRIMARY KEY (policy_id, step)",),
    later_columns={"run_id": 6},
)

CLAIMS = Table(
    "claims",
    {
        "seq": ROW_NUMBER,
        "policy_id": TEXT,
        **{name: sql for name, sql in build_columns(Claim).items() if name != "run_id"},
        "run_id": "TEXT NOT NULL DEFAULT ''",
    },
    constraints=("UNIQUE (policy_id, epoch, sample_key)",),
    generated=("seq",),
    later_columns={"run_id": 6},
)

EVALUATIONS = Table(
    "evaluations",
    build_columns(Evaluation),
    constraints=("PRIMARY KEY (policy_id, version, incumbent)",),
    added_in=6,
)

# The rows contain no text of sessions.
EVALUATION_ITEMS = Table(
    "evaluation_items",
    build_columns(EvaluationItem),
    constraints=("PRIMARY KEY (policy_id, version, incumbent, set_name, item_key)",),
    added_in=6,
)

ENDPOINTS = Table("endpoints", build_columns(Endpoint), constraints=("PRIMARY KEY (run_id, role, name)",))

KEYS = Table("keys", build_columns(KeyRow) | {"key_hash": "TEXT PRIMARY KEY"}, added_in=2)

SECRETS = Table("secrets", {"name": "TEXT PRIMARY KEY", "value": BLOB}, added_in=2)

LEASES = Table(
    "leases",
    {"run_id": TEXT, "name": TEXT, "lease": INTEGER},
    constraints=("PRIMARY KEY (run_id, name)",),
    added_in=3,
)

# Maintained by triggers: progress is polled, and counting rows would get slower with every group.
GROUP_COUNTS = Table(
    "group_counts",
    {"run_id": TEXT, "channel": TEXT, "status": TEXT, "consumed": INTEGER, "n": INTEGER},
    constraints=("PRIMARY KEY (run_id, channel, status, consumed)",),
)
SESSION_COUNTS = Table(
    "session_counts",
    {"run_id": TEXT, "channel": TEXT, "status": TEXT, "n": INTEGER},
    constraints=("PRIMARY KEY (run_id, channel, status)",),
)

TABLES_WITH_TEXT = (
    *(GROUPS, SESSIONS, TOOLS, CALLS, REWARDS, SCORES, TAGS, FEEDBACK),
    *(SHADOW_REPLIES, SESSION_USERS, JUDGMENTS),
)
"""The tables with the data of sessions, from which `forgetting` deletes."""

TABLES = (
    RUNS,
    GROUPS,
    SESSIONS,
    TOOLS,
    CALLS,
    REWARDS,
    SCORES,
    TAGS,
    FEEDBACK,
    SHADOW_REPLIES,
    SESSION_USERS,
    FORGOTTEN_SESSIONS,
    JUDGMENTS,
    DATASETS,
    POLICIES,
    STEPS,
    CLAIMS,
    EVALUATIONS,
    EVALUATION_ITEMS,
    ENDPOINTS,
    KEYS,
    SECRETS,
    LEASES,
    GROUP_COUNTS,
    SESSION_COUNTS,
)
