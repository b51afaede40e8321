"""Queries for the evaluations of candidates, and the moves between stages that follow from them.

An evaluation compares a candidate with one serving version. If another version is served meanwhile, a new
evaluation begins, so scores against different versions are never mixed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from instar.store.database import Database
from instar.store.lineage import advance_version, get_policy_versions, promote_version, reject_version
from instar.store.models import Evaluation, EvaluationItem
from instar.store.policies import get_latest_policy, lock_versions
from instar.store.rows import EVALUATION_ITEM_ROWS, EVALUATION_ROWS
from instar.store.schema import EVALUATION_ITEMS, EVALUATIONS
from instar.types import PolicyStage, PolicyState, StepState

_KEYS = ("policy_id", "version", "incumbent")


def get_evaluations(db: Database, policy_id: str) -> list[Evaluation]:
    """Return the evaluations of the policy's versions in the order in which they began."""
    return EVALUATION_ROWS.select(
        db, "SELECT * FROM evaluations WHERE policy_id = ? ORDER BY number", (policy_id,)
    )


def begin_evaluation(
    db: Database, policy_id: str, version: int, incumbent: int, method: str, get_alpha: Callable[[int], float]
) -> Evaluation:
    """Return the evaluation of the version against the incumbent. A new one gets the lineage's next number
    and ``get_alpha(number)`` of its error budget."""
    lock_versions(db, policy_id)
    evaluations = get_evaluations(db, policy_id)
    for evaluation in evaluations:
        if (evaluation.version, evaluation.incumbent) == (version, incumbent):
            return evaluation
    number = max((evaluation.number for evaluation in evaluations), default=0) + 1
    now = time.time()
    evaluation = Evaluation(
        policy_id, version, incumbent, number, get_alpha(number), method, started_at=now, updated_at=now
    )
    db.execute(EVALUATIONS.insert_sql, EVALUATION_ROWS.encode(evaluation))
    return evaluation


def add_evaluation_item(db: Database, item: EvaluationItem) -> None:
    """Record the scores of an item. An item that is already recorded does not change."""
    conflict = " ON CONFLICT DO NOTHING"
    db.execute(EVALUATION_ITEMS.insert_sql + conflict, EVALUATION_ITEM_ROWS.encode(item))


def get_evaluation_items(db: Database, policy_id: str, version: int, incumbent: int) -> list[EvaluationItem]:
    return EVALUATION_ITEM_ROWS.select(
        db,
        "SELECT * FROM evaluation_items WHERE policy_id = ? AND version = ? AND incumbent = ? "
        "ORDER BY set_name, item_key",
        (policy_id, version, incumbent),
    )


def record_evaluation(db: Database, evaluation: Evaluation, next_stage: PolicyStage | None = None) -> bool:
    """Store the results and the decision of an evaluation. If ``next_stage`` is set, also move the candidate
    there in the same transaction. Return False and change nothing if the version is no longer a candidate,
    or if another version than the incumbent is served."""
    lock_versions(db, evaluation.policy_id)
    if next_stage is not None:
        move = (evaluation.policy_id, evaluation.version, PolicyStage.CANDIDATE, next_stage)
        if not move_version(db, *move, evaluation.reason, incumbent=evaluation.incumbent):
            return False
    row = EVALUATION_ROWS.encode(replace(evaluation, updated_at=time.time()))
    db.execute(EVALUATIONS.insert_sql + EVALUATIONS.build_upsert_clause(*_KEYS), row)
    return True


def move_version(
    db: Database,
    policy_id: str,
    version: int,
    stage: PolicyStage,
    next_stage: PolicyStage,
    reason: str,
    *,
    incumbent: int | None = None,
) -> bool:
    """Move a version from ``stage`` to ``next_stage``. Return False and change nothing if it is in another
    stage, or if ``incumbent`` is set and another version is served, because a person or another process was
    faster."""
    lock_versions(db, policy_id)
    if incumbent not in (None, get_latest_policy(db, policy_id).version):
        return False
    stages = {row.policy.version: row.stage for row in get_policy_versions(db, policy_id)}
    if stages.get(version) is not stage:
        return False
    match next_stage:
        case PolicyStage.SERVING:
            promote_version(db, policy_id, version)
        case PolicyStage.REJECTED:
            reject_version(db, policy_id, version, reason)
        case _:
            advance_version(db, policy_id, version, next_stage, reason)
    return True


def get_promotable_versions(db: Database, policy_id: str) -> list[int]:
    """Return the pending versions whose steps are committed, so that a crash cannot undo them."""
    rows = db.execute(
        "SELECT p.version FROM policies p JOIN steps s ON p.policy_id = s.policy_id AND p.step = s.step "
        "WHERE p.policy_id = ? AND p.state = ? AND s.state = ? AND p.stage IN (?, ?, ?) ORDER BY p.version",
        (
            *(policy_id, PolicyState.PUBLISHED.value, StepState.COMMITTED.value),
            *(stage.value for stage in PolicyStage if stage.is_pending),
        ),
    )
    return [row["version"] for row in rows]
