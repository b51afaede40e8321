"""Queries for policy versions. Version 0 has a row only if the run starts from an adapter. Otherwise, it is
the base model."""

from __future__ import annotations

import time

from instar.errors import StoreError
from instar.store.codec import DatabaseRow, sanitize_text
from instar.store.database import Database
from instar.types import Artifact, Policy, PolicyStage, PolicyState

ABANDONED_STAGES = (PolicyStage.REJECTED, PolicyStage.RETIRED)
"""The stages of versions from which training does not continue."""


def reserve_version(
    db: Database,
    policy_id: str,
    run_id: str,
    step: int,
    *,
    parent: int | None = None,
    is_candidate: bool = False,
) -> int:
    """Reserve and return the next version number of the policy. A candidate is rejected at once if its parent
    was rejected or replaced by a rollback while it was trained."""
    lock_versions(db, policy_id)
    stage = PolicyStage.SERVING
    if is_candidate:
        sql = "SELECT stage FROM policies WHERE policy_id = ? AND version = ?"
        parent_row = db.execute(sql, (policy_id, parent)).fetchone()
        is_abandoned = parent_row is not None and parent_row["stage"] in ABANDONED_STAGES
        stage = PolicyStage.REJECTED if is_abandoned else PolicyStage.CANDIDATE
    row = db.execute(
        "SELECT MAX(version) AS newest FROM policies WHERE policy_id = ?", (policy_id,)
    ).fetchone()
    version: int = (row["newest"] or 0) + 1
    db.execute(
        "INSERT INTO policies (policy_id, version, run_id, step, state, updated_at, parent, stage) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (policy_id, version, run_id, step, PolicyState.RESERVED.value, time.time(), parent, stage.value),
    )
    return version


def put_initial_policy(db: Database, policy: Policy, run_id: str) -> None:
    """Record the artifact of version 0, from which the run starts. Replaces an earlier artifact."""
    artifact, state = policy.artifact, PolicyState.PUBLISHED.value
    values = (artifact.kind, artifact.path, artifact.expires_at, state, time.time())
    columns = "artifact_kind, artifact_path, expires_at, state, updated_at"
    changes = ", ".join(f"{column} = excluded.{column}" for column in columns.split(", "))
    db.execute(
        f"INSERT INTO policies (policy_id, version, run_id, step, {columns}) "
        "VALUES (?, 0, ?, 0, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (policy_id, version) DO UPDATE SET {changes}",
        (policy.policy_id, run_id, *values),
    )


def lock_versions(db: Database, policy_id: str) -> None:
    """Make other transactions that change the policy's lineage wait for this one."""
    db.lock_name(f"versions of {policy_id}")


def publish(db: Database, policy: Policy) -> None:
    """Record the artifact of a reserved version and mark the version as published. Publishing a version again
    replaces only its artifact, for example if a remote sampler is exported again before it expires. Raises
    StoreError if the version was never reserved or is tombstoned."""
    if _lock_state(db, policy.policy_id, policy.version) is PolicyState.TOMBSTONED:
        raise StoreError(
            f"version {policy.version} of {policy.policy_id} is tombstoned; reserve a new version"
        )
    artifact, state = policy.artifact, PolicyState.PUBLISHED.value
    values = (artifact.kind, artifact.path, artifact.expires_at, state, state, time.time())
    # The days of a canary are counted from the last change of its stage.
    db.execute(
        "UPDATE policies SET artifact_kind = ?, artifact_path = ?, expires_at = ?, state = ?, "
        "updated_at = CASE WHEN state = ? THEN updated_at ELSE ? END WHERE policy_id = ? AND version = ?",
        (*values, policy.policy_id, policy.version),
    )


def tombstone(db: Database, policy_id: str, version: int, reason: str) -> None:
    """Mark a version as abandoned after a crash. It can no longer be the latest policy."""
    if _lock_state(db, policy_id, version) is PolicyState.TOMBSTONED:
        return
    db.execute(
        "UPDATE policies SET state = ?, reason = ?, updated_at = ? WHERE policy_id = ? AND version = ?",
        (PolicyState.TOMBSTONED.value, sanitize_text(reason), time.time(), policy_id, version),
    )


def _lock_state(db: Database, policy_id: str, version: int) -> PolicyState:
    row = db.execute(
        f"SELECT state FROM policies WHERE policy_id = ? AND version = ?{db.for_update}",
        (policy_id, version),
    ).fetchone()
    if row is None:
        raise StoreError(f"version {version} of {policy_id} was never reserved")
    return PolicyState(row["state"])


def get_reserved_versions(db: Database, policy_id: str) -> list[tuple[int, int]]:
    """Return the version and step of each version that is neither published nor tombstoned."""
    sql = "SELECT version, step FROM policies WHERE policy_id = ? AND state = ? ORDER BY version"
    rows = db.execute(sql, (policy_id, PolicyState.RESERVED.value))
    return [(row["version"], row["step"]) for row in rows]


def get_steps_by_version(db: Database, policy_id: str) -> dict[int, int]:
    rows = db.execute("SELECT version, step FROM policies WHERE policy_id = ?", (policy_id,))
    return {row["version"]: row["step"] for row in rows}


def get_latest_policy(db: Database, policy_id: str) -> Policy:
    """Return the newest serving version, or version 0 with a ``base`` artifact if there is none."""
    sql = (
        "SELECT * FROM policies WHERE policy_id = ? AND state = ? AND stage = ? ORDER BY version DESC LIMIT 1"
    )
    row = db.execute(sql, (policy_id, PolicyState.PUBLISHED.value, PolicyStage.SERVING.value)).fetchone()
    return decode_policy(row) if row else Policy(policy_id, 0, Artifact("base"))


def get_policy_ids(db: Database, run_id: str) -> list[str]:
    """Return the policies of which the run has versions."""
    sql = "SELECT DISTINCT policy_id FROM policies WHERE run_id = ? ORDER BY policy_id"
    return [row["policy_id"] for row in db.execute(sql, (run_id,))]


def get_published_policies(db: Database, policy_id: str) -> list[tuple[Policy, int]]:
    """Return the policy and step of each published version, oldest first."""
    sql = "SELECT * FROM policies WHERE policy_id = ? AND state = ? ORDER BY version"
    rows = db.execute(sql, (policy_id, PolicyState.PUBLISHED.value))
    return [(decode_policy(row), row["step"]) for row in rows]


def decode_policy(row: DatabaseRow) -> Policy:
    artifact = Artifact(row["artifact_kind"], row["artifact_path"], row["expires_at"])
    return Policy(row["policy_id"], row["version"], artifact)
