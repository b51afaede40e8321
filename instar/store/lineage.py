"""Queries that change which version of a policy is served.

Only versions from live traffic are candidates; all others are serving from the start. Version numbers are
never reused: a rollback publishes the weights of an earlier version again, under a new number.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from instar.errors import ConflictError, StoreError
from instar.store.codec import sanitize_text
from instar.store.database import Database
from instar.store.models import PolicyVersion
from instar.store.policies import decode_policy, get_latest_policy, lock_versions
from instar.types import Artifact, Policy, PolicyStage, PolicyState, StepState


def get_policy_versions(db: Database, policy_id: str) -> list[PolicyVersion]:
    """Return all versions except tombstoned ones and the base model, oldest first."""
    rows = db.execute(
        "SELECT * FROM policies WHERE policy_id = ? AND state != ? ORDER BY version",
        (policy_id, PolicyState.TOMBSTONED.value),
    )
    return [
        PolicyVersion(
            policy=decode_policy(row)
            if row["artifact_kind"]
            else Policy(policy_id, row["version"], Artifact("base")),
            step=row["step"],
            state=PolicyState(row["state"]),
            stage=PolicyStage(row["stage"]),
            parent=row["parent"],
            promoted_at=row["promoted_at"],
            updated_at=row["updated_at"],
            reason=row["reason"],
        )
        for row in rows
    ]


def get_rejected_versions(db: Database, policy_id: str) -> dict[int, int]:
    """Return the rejected version of each step that made one. Samples that these steps claimed are in no
    version that was served."""
    rows = db.execute(
        "SELECT step, version FROM policies WHERE policy_id = ? AND stage = ? ORDER BY version",
        (policy_id, PolicyStage.REJECTED.value),
    )
    return {row["step"]: row["version"] for row in rows}


def advance_version(db: Database, policy_id: str, version: int, stage: PolicyStage, reason: str) -> None:
    """Move a candidate to the stage `shadow` or `canary`. Raises StoreError if the version is not a candidate
    in an earlier stage, or if a crash could still undo its training step."""
    order = (PolicyStage.CANDIDATE, PolicyStage.SHADOW, PolicyStage.CANARY)
    lock_versions(db, policy_id)
    versions = {row.policy.version: row for row in get_policy_versions(db, policy_id)}
    candidate = _require_committed(db, policy_id, versions, version)
    if stage not in order or order.index(stage) <= order.index(candidate.stage):
        raise StoreError(f"version {version} cannot move from the stage {candidate.stage} to {stage}")
    _set_stage(db, policy_id, [version], stage, reason)


def promote_version(db: Database, policy_id: str, version: int) -> None:
    """Make a candidate the serving version, and retire the versions before it. Raises StoreError if the
    version is not a candidate, or if a crash could still undo its training step."""
    lock_versions(db, policy_id)
    versions = {row.policy.version: row for row in get_policy_versions(db, policy_id)}
    _require_committed(db, policy_id, versions, version)
    # A version that served from the start can then be told from candidates that never did.
    db.execute(
        "UPDATE policies SET promoted_at = COALESCE(promoted_at, updated_at) "
        "WHERE policy_id = ? AND version = ?",
        (policy_id, get_latest_policy(db, policy_id).version),
    )
    earlier = [
        number
        for number, row in versions.items()
        if number < version and (row.stage.is_pending or row.stage is PolicyStage.SERVING)
    ]
    _set_stage(db, policy_id, earlier, PolicyStage.RETIRED, f"replaced by version {version}")
    _set_stage(db, policy_id, [version], PolicyStage.SERVING, None)
    db.execute(
        "UPDATE policies SET promoted_at = ? WHERE policy_id = ? AND version = ?",
        (time.time(), policy_id, version),
    )


def reject_version(db: Database, policy_id: str, version: int, reason: str) -> list[int]:
    """Reject a candidate and the candidates that were trained from it. Return their numbers. Raises
    StoreError if the version is not a candidate."""
    lock_versions(db, policy_id)
    rows = get_policy_versions(db, policy_id)
    versions = {row.policy.version: row for row in rows}
    _require_candidate(versions.get(version), rows, version)
    rejected = [version]
    for row in rows:
        if row.stage.is_pending and row.parent in rejected:
            rejected.append(row.policy.version)
    _set_stage(db, policy_id, rejected, PolicyStage.REJECTED, reason)
    return rejected


def roll_back(
    db: Database, policy_id: str, run_id: str, version: int, cause: str = "", *, serving: int | None = None
) -> int:
    """Serve the weights of an earlier version again, under a new number, which is returned. The serving
    version is retired, and all candidates are rejected, because they were trained from it. ``cause`` becomes
    part of their reason. Raises StoreError if the version was never served or is served now, and
    ConflictError if ``serving`` is set and another version is served."""
    lock_versions(db, policy_id)
    rows = get_policy_versions(db, policy_id)
    served = {row.policy.version: row for row in rows if row.was_served}
    head = get_latest_policy(db, policy_id)
    if serving not in (None, head.version):
        raise ConflictError(f"version {head.version} of {policy_id} is served now, not version {serving}")
    if version == head.version or (version != 0 and version not in served):
        known = sorted({0, *served} - {head.version})
        raise StoreError(
            f"version {version} cannot be rolled back to: version {head.version} is served now, and the "
            f"versions served before are {', '.join(map(str, known)) or 'none'}"
        )
    newest = db.execute(
        "SELECT MAX(version) AS newest FROM policies WHERE policy_id = ?", (policy_id,)
    ).fetchone()["newest"]
    source = served.get(version)
    artifact = Artifact("base") if source is None else source.policy.artifact
    number: int = newest + 1
    reason = f"rollback to version {version}" + (f": {cause}" if cause else "")
    pending = [row.policy.version for row in rows if row.stage.is_pending]
    replaced = [row.policy.version for row in rows if row.stage is PolicyStage.SERVING]
    _set_stage(db, policy_id, pending, PolicyStage.REJECTED, reason)
    _set_stage(db, policy_id, replaced, PolicyStage.RETIRED, reason)
    now = time.time()
    db.execute(
        "INSERT INTO policies (policy_id, version, run_id, step, state, artifact_kind, artifact_path, "
        "expires_at, reason, updated_at, parent, stage, promoted_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(policy_id, number, run_id, source.step if source else 0, PolicyState.PUBLISHED.value),
            *(artifact.kind, artifact.path, artifact.expires_at, sanitize_text(reason), now, version),
            *(PolicyStage.SERVING.value, now),
        ),
    )
    return number


def _require_committed(
    db: Database, policy_id: str, versions: Mapping[int, PolicyVersion], version: int
) -> PolicyVersion:
    """Return the candidate. Raises StoreError if it is not one, or if a crash could still undo its step."""
    candidate = _require_candidate(versions.get(version), versions.values(), version)
    sql = (
        "SELECT s.state FROM steps s JOIN policies p ON p.policy_id = s.policy_id AND p.step = s.step "
        "WHERE p.policy_id = ? AND p.version = ?"
    )
    step = db.execute(sql, (policy_id, version)).fetchone()
    if candidate.state is not PolicyState.PUBLISHED or step is None or step["state"] != StepState.COMMITTED:
        raise StoreError(
            f"version {version} cannot be promoted before step {candidate.step} is committed; retry after "
            "the next checkpoint (trainer.checkpoint_every)"
        )
    return candidate


def _require_candidate(
    row: PolicyVersion | None, rows: Iterable[PolicyVersion], version: int
) -> PolicyVersion:
    if row is not None and row.stage.is_pending:
        return row
    candidates = ", ".join(str(r.policy.version) for r in rows if r.stage.is_pending) or "none"
    problem = "does not exist" if row is None else f"is {row.stage}"
    raise StoreError(f"version {version} {problem}, but must be a candidate. Candidates: {candidates}")


def _set_stage(
    db: Database, policy_id: str, versions: Sequence[int], stage: PolicyStage, reason: str | None
) -> None:
    for version in versions:
        db.execute(
            "UPDATE policies SET stage = ?, reason = ?, updated_at = ? WHERE policy_id = ? AND version = ?",
            (stage.value, sanitize_text(reason), time.time(), policy_id, version),
        )
