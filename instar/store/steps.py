"""Queries for training steps, claims and progress."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from instar.errors import ConflictError, StoreError
from instar.store.codec import dump_json
from instar.store.database import Database
from instar.store.forgetting import lock_and_find_forgotten
from instar.store.models import Progress
from instar.store.policies import get_latest_policy
from instar.store.rows import CLAIM_ROWS, STEP_ROWS, encode_claim, match_columns
from instar.store.schema import CLAIMS, STEPS
from instar.types import Channel, Claim, ClaimOutcome, GroupStatus, Json, Step, StepState

STATE_ORDER = (StepState.CLAIMED, StepState.SUBMITTED, StepState.SAVED, StepState.COMMITTED)


FORGOTTEN = "forgotten"
"""The reason of a drop if the data of the session was deleted after the batch had been built."""


def claim_step(
    db: Database, policy_id: str, step: int, claims: Sequence[Claim], *, run_id: str | None = None
) -> frozenset[str]:
    """Atomically insert a step in state ``claimed`` together with its claims. The claims cover all samples in
    the step's groups, both trained and dropped. If the data of a session was deleted in the meantime, its
    samples are recorded as dropped; return the ids of these sessions, which must not be trained on.
    ``run_id`` is the run of the policy, by default the run with the policy's id. Raises ConflictError if the
    step exists and is not released or a sample is already claimed for the policy in the epoch, and StoreError
    if a claim is for another step, policy or run."""
    run_id = policy_id if run_id is None else run_id
    for claim in claims:
        is_other_policy = claim.policy_id not in ("", policy_id)
        if claim.run_id != run_id or is_other_policy or claim.step not in (None, step):
            raise StoreError(
                f"the claim for sample {claim.sample_key} must be for step {step} of {policy_id} in run "
                f"{run_id}, got step {claim.step} of {claim.policy_id or claim.run_id} in run {claim.run_id}"
            )
    current = _lock_step(db, policy_id, step)
    if current is not None and current.state is not StepState.RELEASED:
        raise ConflictError(f"step {step} of {policy_id} already exists in state {current.state}")
    db.execute("DELETE FROM steps WHERE policy_id = ? AND step = ?", (policy_id, step))
    row = Step(policy_id, step, StepState.CLAIMED, run_id=run_id)
    db.execute(STEPS.insert_sql, STEP_ROWS.encode(row))
    trained = {claim.session_id for claim in claims if claim.outcome is ClaimOutcome.TRAINED}
    forgotten = lock_and_find_forgotten(db, trained)
    dropped = {"outcome": ClaimOutcome.DROPPED.value, "reason": FORGOTTEN}
    rows = [
        encode_claim(claim, step)
        | {"policy_id": policy_id}
        | (dropped if claim.outcome is ClaimOutcome.TRAINED and claim.session_id in forgotten else {})
        for claim in claims
    ]
    _add_claims(db, rows)
    return forgotten


def drop_samples(db: Database, claims: Sequence[Claim]) -> None:
    """Record dropped samples. A drop that belongs to a step is released with it. Raises StoreError if a claim
    is not a drop or has no reason, and ConflictError if a sample is already claimed for the policy in the
    epoch."""
    for claim in claims:
        if claim.outcome is not ClaimOutcome.DROPPED or not claim.reason:
            raise StoreError(
                f"the claim for sample {claim.sample_key} must be a drop with a reason, got outcome "
                f"{claim.outcome} and reason {claim.reason!r}"
            )
    _add_claims(db, [encode_claim(claim, claim.step) for claim in claims])


def _add_claims(db: Database, claims: Sequence[dict[str, Any]]) -> None:
    for (policy_id, epoch), group in groupby(claims, key=lambda claim: (claim["policy_id"], claim["epoch"])):
        _check_unclaimed(db, policy_id, epoch, [claim["sample_key"] for claim in group])
    # If two processes get here at the same time, the unique index rejects the second insert.
    db.insert(CLAIMS, [CLAIMS.to_values(claim) for claim in claims])
    refresh_claim_columns(db, {claim["group_id"] for claim in claims})


def _check_unclaimed(db: Database, policy_id: str, epoch: int, sample_keys: Sequence[str]) -> None:
    row = db.execute(
        "SELECT sample_key, outcome, step FROM claims WHERE policy_id = ? AND epoch = ? "
        f"AND sample_key IN ({db.json_array_sql.format('?')}) ORDER BY seq LIMIT 1",
        (policy_id, epoch, json.dumps(sample_keys)),
    ).fetchone()
    if row is not None:
        owner = f"by step {row['step']}" if row["step"] is not None else f"as {row['outcome']}"
        raise ConflictError(
            f"sample {row['sample_key']} is already claimed {owner} in epoch {epoch} of {policy_id}"
        )


def advance_step(
    db: Database,
    policy_id: str,
    step: int,
    state: StepState,
    *,
    state_path: str | None = None,
    version: int | None = None,
    metrics: Json | None = None,
) -> None:
    """Move a step to a later state and store the values that are not None. Repeating the current state is
    allowed, because a commit with an unknown outcome is retried. Raises StoreError if the step is not
    claimed, or if ``state`` is earlier than its current state."""
    current = _lock_step(db, policy_id, step)
    if current is None or current.state is StepState.RELEASED:
        raise StoreError(f"step {step} of {policy_id} is not claimed")
    if state not in STATE_ORDER or STATE_ORDER.index(state) < STATE_ORDER.index(current.state):
        raise StoreError(f"step {step} of {policy_id} is {current.state} and cannot become {state}")
    metrics_json = None if metrics is None else dump_json(metrics)
    db.execute(
        "UPDATE steps SET state = ?, state_path = COALESCE(?, state_path), version = COALESCE(?, version), "
        "metrics = COALESCE(?, metrics), updated_at = ? WHERE policy_id = ? AND step = ?",
        (state.value, state_path, version, metrics_json, time.time(), policy_id, step),
    )
    if state is StepState.COMMITTED or version is not None:
        refresh_claim_columns(db, _get_group_ids(db, policy_id, step))


def release_steps(db: Database, policy_id: str, after: int, *, include_saved: bool = False) -> list[int]:
    """Release all unsaved steps of the policy later than ``after`` and delete their claims. Return the
    released steps. With ``include_saved``, also release saved and committed steps; use it if their weights
    have been lost."""
    states = [state.value for state in (STATE_ORDER if include_saved else STATE_ORDER[:2])]
    rows = db.execute(
        "SELECT step FROM steps WHERE policy_id = ? AND step > ? "
        f"AND state IN ({db.json_array_sql.format('?')}) ORDER BY step{db.for_update}",
        (policy_id, after, json.dumps(states)),
    ).fetchall()
    released = [int(row["step"]) for row in rows]
    for step in released:
        group_ids = _get_group_ids(db, policy_id, step)
        db.execute("DELETE FROM claims WHERE policy_id = ? AND step = ?", (policy_id, step))
        db.execute(
            "UPDATE steps SET state = ?, updated_at = ? WHERE policy_id = ? AND step = ?",
            (StepState.RELEASED.value, time.time(), policy_id, step),
        )
        refresh_claim_columns(db, group_ids)
    return released


def _lock_step(db: Database, policy_id: str, step: int) -> Step | None:
    return STEP_ROWS.select_one(
        db, f"SELECT * FROM steps WHERE policy_id = ? AND step = ?{db.for_update}", (policy_id, step)
    )


def _get_group_ids(db: Database, policy_id: str, step: int) -> list[str | None]:
    sql = "SELECT DISTINCT group_id FROM claims WHERE policy_id = ? AND step = ?"
    return [row["group_id"] for row in db.execute(sql, (policy_id, step))]


def get_steps(db: Database, policy_id: str) -> list[Step]:
    """Return all steps of the policy that are not released, in order."""
    sql = "SELECT * FROM steps WHERE policy_id = ? AND state != ? ORDER BY step"
    return STEP_ROWS.select(db, sql, (policy_id, StepState.RELEASED.value))


def count_steps(db: Database, run_id: str) -> tuple[int, int]:
    """Return the number of the run's steps that are not released, and of those whose update is in the weights
    of their policy."""
    sql = """
        SELECT COUNT(*) AS steps, COUNT(CASE WHEN state = ? OR version IS NOT NULL THEN 1 END) AS trained
        FROM steps WHERE run_id = ? AND state != ?
    """
    row = db.execute(sql, (StepState.COMMITTED.value, run_id, StepState.RELEASED.value)).fetchone()
    return row["steps"], row["trained"]


def get_steps_to_commit(db: Database, policy_id: str, saved_step: int) -> list[Step]:
    """Return the saved step of the policy, and all earlier steps that are not committed, in order."""
    sql = """
        SELECT * FROM steps WHERE policy_id = ? AND (step = ? OR (step < ? AND state NOT IN (?, ?)))
        ORDER BY step
    """
    excluded = (StepState.COMMITTED.value, StepState.RELEASED.value)
    return STEP_ROWS.select(db, sql, (policy_id, saved_step, saved_step, *excluded))


def get_claims(
    db: Database,
    run_id: str,
    *,
    policy_id: str | None = None,
    step: int | None = None,
    session_id: str | None = None,
) -> list[Claim]:
    where, values = match_columns(run_id=run_id, policy_id=policy_id, step=step, session_id=session_id)
    return CLAIM_ROWS.select(db, f"SELECT * FROM claims WHERE {where} ORDER BY seq", values)


def get_recent_claims(db: Database, run_id: str, epoch: int, limit: int) -> list[Claim]:
    """Return this epoch's claims on the last ``limit`` claimed training groups by index, oldest first."""
    return CLAIM_ROWS.select(
        db,
        "SELECT * FROM claims WHERE run_id = ? AND epoch = ? AND group_id IN (SELECT group_id FROM groups "
        "WHERE run_id = ? AND channel = ? AND claimed_epoch >= ? ORDER BY idx DESC LIMIT ?) ORDER BY seq",
        (run_id, epoch, run_id, Channel.TRAIN.value, epoch, limit),
    )


def refresh_claim_columns(db: Database, group_ids: Iterable[str | None]) -> None:
    """Update the columns ``consumed`` and ``claimed_epoch`` of these groups.

    A group is consumed if it was dropped, or if it has claims and all of them are final. A claim is final if
    it has no step, or if its step is committed or has published a version. Claims by other runs are ignored.
    """
    ids = json.dumps(sorted(group_id for group_id in group_ids if group_id is not None))
    group_filter = f"group_id IN ({db.json_array_sql.format(':groups')})"
    if db.for_update:
        # Lock first, because an UPDATE that waits for a lock reads the claims as they were before the wait.
        db.execute(
            f"SELECT 1 FROM groups WHERE {group_filter} ORDER BY group_id{db.for_update}", {"groups": ids}
        )
    db.execute(
        f"""
        UPDATE groups SET
          claimed_epoch = COALESCE((SELECT MAX(c.epoch) FROM claims c
            WHERE c.group_id = groups.group_id AND c.run_id = groups.run_id), -1),
          consumed = CASE WHEN status = :dropped_group OR (
            EXISTS (SELECT 1 FROM claims c
              WHERE c.group_id = groups.group_id AND c.run_id = groups.run_id)
            AND NOT EXISTS (
              SELECT 1 FROM claims c LEFT JOIN steps s ON s.policy_id = c.policy_id AND s.step = c.step
              WHERE c.group_id = groups.group_id AND c.run_id = groups.run_id AND c.step IS NOT NULL
                AND COALESCE(s.state, '') != :committed AND s.version IS NULL))
            THEN 1 ELSE 0 END
        WHERE {group_filter}""",
        {
            "groups": ids,
            "dropped_group": GroupStatus.DROPPED.value,
            "committed": StepState.COMMITTED.value,
        },
    )


def get_progress(db: Database, run_id: str, channel: Channel = Channel.TRAIN) -> Progress:
    key = (run_id, channel.value)
    groups: Counter[str] = Counter()
    for row in db.execute(
        "SELECT status, consumed, CAST(SUM(n) AS BIGINT) AS n FROM group_counts "
        "WHERE run_id = ? AND channel = ? GROUP BY status, consumed",
        key,
    ):
        groups["consumed" if row["consumed"] else row["status"]] += row["n"]
    ready, consumed = groups[GroupStatus.READY.value], groups["consumed"]
    sql = "SELECT MAX(idx) AS idx FROM groups WHERE run_id = ? AND channel = ?"
    last_group = db.execute(sql, key).fetchone()
    sql = "SELECT COUNT(*) AS n FROM steps WHERE run_id = ? AND state = ?"
    committed = db.execute(sql, (run_id, StepState.COMMITTED.value)).fetchone()
    run = db.execute("SELECT policy_id FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    sessions = db.execute(
        "SELECT status, CAST(SUM(n) AS BIGINT) AS n FROM session_counts "
        "WHERE run_id = ? AND channel = ? GROUP BY status HAVING SUM(n) > 0",
        key,
    )
    return Progress(
        groups_open=groups.total() - ready - consumed,
        groups_ready=ready,
        groups_consumed=consumed,
        next_group_index=0 if last_group["idx"] is None else last_group["idx"] + 1,
        committed_steps=committed["n"],
        head_version=get_latest_policy(db, run["policy_id"]).version if run else 0,
        sessions={row["status"]: row["n"] for row in sessions},
    )
