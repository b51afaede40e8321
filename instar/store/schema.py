"""The tables of the SQLite store, with each column declared once. `migrations` updates older files.

Wide blobs come after the narrow columns, so that reading the narrow columns does not touch the blobs. Columns
added by a later version come last, where a migration adds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

VERSION = 4
"""The schema's version, stored in ``PRAGMA user_version``. Increment it with every change to the declarations
here."""

APPLICATION_ID = 0x494E5354
"""The text ``INST`` in ``PRAGMA application_id``, which identifies a file as a store."""


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: dict[str, str]
    """SQL type and constraints by column name, in order."""
    constraints: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    """Columns that the database fills in, so that no values are inserted."""

    @property
    def create_sql(self) -> str:
        lines = [f"{name} {declaration}" for name, declaration in self.columns.items()]
        return f"CREATE TABLE {self.name} (\n  " + ",\n  ".join([*lines, *self.constraints]) + "\n)"

    @property
    def insert_columns(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name not in self.generated)

    @property
    def insert_sql(self) -> str:
        values = ", ".join(f":{name}" for name in self.insert_columns)
        return f"INSERT INTO {self.name} ({', '.join(self.insert_columns)}) VALUES ({values})"

    def insert_many_sql(self, count: int) -> str:
        """Return an INSERT of ``count`` rows, with the values in the order of `insert_columns`."""
        return _insert_many_sql(self.name, self.insert_columns, count)

    def values(self, row: Mapping[str, object]) -> tuple[object, ...]:
        """Return the values of the row in the order of `insert_columns`."""
        return tuple(row[name] for name in self.insert_columns)


@cache
def _insert_many_sql(table: str, names: tuple[str, ...], count: int) -> str:
    row = f"({', '.join('?' for _ in names)})"
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES {', '.join([row] * count)}"


ROW_NUMBER = "INTEGER PRIMARY KEY"
"""The type of a row number, which gives the order in which rows were committed."""

TEXT = "TEXT NOT NULL"
INTEGER = "INTEGER NOT NULL"
REAL = "REAL NOT NULL"
BLOB = "BLOB NOT NULL"

RUNS = Table(
    "runs",
    {
        "run_id": "TEXT PRIMARY KEY",
        "policy_id": TEXT,
        "config": TEXT,
        "status": TEXT,
        "reason": "TEXT",
        "created_at": REAL,
    },
)

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
        # Derived from the claims whenever they change (`steps.refresh_consumed`), so that reading the
        # progress is a lookup.
        "consumed": "INTEGER NOT NULL DEFAULT 0",
        "created_at": REAL,
        # The last epoch with a claim by the group's own run, or -1. Derived like `consumed`, so that
        # unclaimed groups are found without reading the claimed ones.
        "claimed_epoch": "INTEGER NOT NULL DEFAULT -1",
    },
    generated=("seq", "consumed", "claimed_epoch"),
)

SESSIONS = Table(
    "sessions",
    {
        "seq": ROW_NUMBER,
        "session_id": "TEXT NOT NULL UNIQUE",
        "run_id": TEXT,
        "agent_id": TEXT,
        "policy_id": TEXT,
        "channel": TEXT,
        "status": TEXT,
        "group_id": "TEXT",
        "slot": INTEGER,
        "attempt": INTEGER,
        "task_id": "TEXT",
        "reason": "TEXT",
        "seed": "INTEGER",
        "sampling": TEXT,
        "metadata": TEXT,
        "key_hash": "TEXT UNIQUE",
        "created_at": REAL,
        "ended_at": "REAL",
        "external_id": "TEXT",
        # The session's latest reward without a call, copied from `rewards` so that sessions can be filtered.
        "reward": "REAL",
    },
    generated=("seq", "reward"),
)

TOOLS = Table("tools", {"hash": "TEXT PRIMARY KEY", "body": TEXT})

CALLS = Table(
    "calls",
    {
        "seq": ROW_NUMBER,
        "call_id": "TEXT NOT NULL UNIQUE",
        "session_id": "TEXT NOT NULL REFERENCES sessions (session_id)",
        "run_id": TEXT,
        "agent_id": TEXT,
        "policy_id": TEXT,
        "request_id": TEXT,
        "parent_id": "TEXT",
        "link": TEXT,
        "base_id": "TEXT",
        "base_tokens": INTEGER,
        "base_messages": INTEGER,
        # Checksums of the prompt and of prompt + sampled tokens; a rebuilt call is verified against them.
        "prompt_tokens": INTEGER,
        "prompt_crc": INTEGER,
        "sampled_tokens": INTEGER,
        "sequence_crc": INTEGER,
        "message_count": INTEGER,
        "status": TEXT,
        "trainable": INTEGER,
        "reason": "TEXT",
        "finish_reason": TEXT,
        "dialect": TEXT,
        "params": TEXT,
        "started_at": REAL,
        "first_token_at": "REAL",
        "ended_at": REAL,
        "tools_hash": "TEXT REFERENCES tools (hash)",
        "versions": BLOB,
        "prompt_ids": BLOB,
        "sampled_ids": BLOB,
        "logprobs": BLOB,
        "behavior_logprobs": "BLOB",
        "messages": TEXT,
        "reply": TEXT,
        "model": "TEXT NOT NULL DEFAULT ''",
        "client_key": "TEXT",
        "digests": "BLOB NOT NULL DEFAULT x''",
        # The key by which a request that continues this call is found; only calls of live sessions have one.
        "tail_key": "BLOB",
    },
    generated=("seq",),
)

REWARDS = Table(
    "rewards",
    {
        "seq": ROW_NUMBER,
        "session_id": "TEXT NOT NULL REFERENCES sessions (session_id)",
        "run_id": TEXT,
        "agent_id": TEXT,
        "policy_id": TEXT,
        "call_id": "TEXT",
        "value": REAL,
        "source": TEXT,
        "scorer": TEXT,
        "detail": TEXT,
        "created_at": REAL,
        "reward_id": "TEXT",
        "scorer_version": "TEXT NOT NULL DEFAULT ''",
        "cost": "REAL NOT NULL DEFAULT 0",
    },
    generated=("seq",),
)

SCORES = Table(
    "scores",
    {
        "session_id": "TEXT NOT NULL REFERENCES sessions (session_id)",
        "scorer": TEXT,
        "run_id": TEXT,
        "state": TEXT,
        "attempts": INTEGER,
        "reason": "TEXT",
        "created_at": REAL,
    },
    constraints=("PRIMARY KEY (session_id, scorer)",),
)

TAGS = Table(
    "tags",
    {
        "session_id": "TEXT NOT NULL REFERENCES sessions (session_id)",
        "name": TEXT,
        "run_id": TEXT,
        "value": TEXT,
        "reason": TEXT,
        "author": TEXT,
        "created_at": REAL,
    },
    constraints=("PRIMARY KEY (session_id, name)",),
)

FEEDBACK = Table(
    "feedback",
    {
        "seq": ROW_NUMBER,
        "feedback_id": "TEXT NOT NULL UNIQUE",
        "session_id": "TEXT NOT NULL REFERENCES sessions (session_id)",
        "run_id": TEXT,
        "call_id": "TEXT",
        "thumbs": "INTEGER",
        "score": "REAL",
        "text": TEXT,
        "correction": "TEXT",
        "correction_ids": "BLOB",
        "author": TEXT,
        "created_at": REAL,
    },
    generated=("seq",),
)

# A judge's answers, keyed by the question, so that the same question is not paid for twice.
JUDGMENTS = Table(
    "judgments",
    {"key": "BLOB PRIMARY KEY", "run_id": TEXT, "answer": TEXT, "cost": REAL, "created_at": REAL},
)

DATASETS = Table(
    "datasets",
    {
        "name": TEXT,
        "version": INTEGER,
        "path": TEXT,
        "hash": TEXT,
        "manifest": TEXT,
        "created_at": REAL,
    },
    constraints=("PRIMARY KEY (name, version)",),
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
    },
    constraints=("PRIMARY KEY (policy_id, version)",),
)

STEPS = Table(
    "steps",
    {
        "run_id": TEXT,
        "step": INTEGER,
        "state": TEXT,
        "state_path": "TEXT",
        "version": "INTEGER",
        "metrics": TEXT,
        "updated_at": REAL,
    },
    constraints=("PRIMARY KEY (run_id, step)",),
)

CLAIMS = Table(
    "claims",
    {
        "seq": ROW_NUMBER,
        "run_id": TEXT,
        "epoch": INTEGER,
        "sample_key": TEXT,
        "session_id": TEXT,
        "group_id": "TEXT",
        "outcome": TEXT,
        "step": "INTEGER",
        "reason": "TEXT",
        "reward": "REAL",
        "advantage": "REAL",
        "staleness": "INTEGER",
    },
    constraints=("UNIQUE (run_id, epoch, sample_key)",),
    generated=("seq",),
)

ENDPOINTS = Table(
    "endpoints",
    {
        "run_id": TEXT,
        "role": TEXT,
        "name": TEXT,
        "url": TEXT,
        "pid": INTEGER,
        "doing": TEXT,
        "log": TEXT,
        "heartbeat": REAL,
    },
    constraints=("PRIMARY KEY (run_id, role, name)",),
)

KEYS = Table(
    "keys",
    {
        "key_hash": "TEXT PRIMARY KEY",
        "kind": TEXT,
        "agent_id": "TEXT",
        "name": TEXT,
        "created_at": REAL,
        "revoked_at": "REAL",
    },
)

SECRETS = Table("secrets", {"name": "TEXT PRIMARY KEY", "value": BLOB})

LEASES = Table(
    "leases",
    {"run_id": TEXT, "name": TEXT, "lease": INTEGER},
    constraints=("PRIMARY KEY (run_id, name)",),
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
    JUDGMENTS,
    DATASETS,
    POLICIES,
    STEPS,
    CLAIMS,
    ENDPOINTS,
    KEYS,
    SECRETS,
    LEASES,
    GROUP_COUNTS,
    SESSION_COUNTS,
)
