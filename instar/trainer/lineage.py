"""Decides from which version a trainer of candidates continues, and which files must be kept to serve it.

Versions from live traffic are candidates. Training continues from the newest candidate, until it is rejected
or a rollback replaces it. Then it continues from the serving version.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from instar.backends.base import Backend
from instar.config import RunConfig
from instar.errors import InstarError
from instar.store.base import PolicyVersion, Store
from instar.trainer.checkpoint import (
    BACKEND_FOLDER,
    TrainerState,
    checkpoint_path,
    find_damage,
    is_pruned,
    load_initial_weights,
    policy_path,
    prune_folder,
    save_checkpoint,
)
from instar.types import Policy, PolicyStage

logger = logging.getLogger(__name__)

INITIAL_STEP = 0
"""The number of the checkpoint with the weights before the first step."""


def get_checkpoint_path(config: RunConfig, policy_id: str, step: int) -> Path:
    """Return the checkpoint of a policy's step. The initial weights are the same for all policies."""
    is_initial = step == INITIAL_STEP
    return checkpoint_path(config.run_dir if is_initial else config.get_policy_dir(policy_id), step)


async def load_shared_initial_weights(config: RunConfig, backend: Backend) -> None:
    """Load the weights that all policies start from. The first call saves them, and must come before the
    backend has loaded anything else. Raises InstarError if they are damaged or missing in a later call."""
    path = checkpoint_path(config.run_dir, INITIAL_STEP)
    if not path.is_dir():
        await load_initial_weights(config, backend)
        await save_checkpoint(config.run_dir, backend, TrainerState(INITIAL_STEP, 0.0))
    elif (damage := await asyncio.to_thread(find_damage, path)) is None:
        await backend.load_state(path / BACKEND_FOLDER)
    else:
        raise InstarError(
            f"The initial weights in {path} are damaged ({damage}). Remove this folder and resume the run, "
            "which saves them again."
        )


async def find_replacement(store: Store, policy_id: str, version: int) -> tuple[Policy, int] | None:
    """Return the serving version and its step if training must not continue from ``version``, because it was
    rejected or replaced, and None otherwise."""
    rows = {row.policy.version: row for row in await store.policy_versions(policy_id)}
    row = rows.get(version)
    if row is None or row.stage.is_pending or row.stage is PolicyStage.SERVING:
        return None
    head = await store.latest_policy(policy_id)
    return head, rows[head.version].step if head.version else INITIAL_STEP


async def load_version(config: RunConfig, backend: Backend, policy: Policy, step: int) -> None:
    """Load the checkpoint of a version's step. If it is damaged or missing, load the published adapter, which
    has no optimizer state. Raises InstarError if neither can be loaded."""
    path = get_checkpoint_path(config, policy.policy_id, step)
    damage = await asyncio.to_thread(find_damage, path)
    if damage is None:
        await backend.load_state(path / BACKEND_FOLDER)
        return
    artifact = policy.artifact
    is_loadable = artifact.kind == "adapter" and "folder" in backend.capabilities.adapter_sources
    if not is_loadable or is_pruned(artifact):
        raise InstarError(
            f"Training cannot continue from version {policy.version}, because the checkpoint {path} is "
            f"damaged or missing ({damage}). Restore it from a backup, or serve another version with "
            "`instar versions`."
        )
    logger.warning(
        "the checkpoint %s is damaged or missing (%s); loading the adapter of version %s, without its "
        "optimizer state",
        path,
        damage,
        policy.version,
    )
    await backend.load_adapter(artifact.path)


async def load_serving_version(
    store: Store, config: RunConfig, backend: Backend, policy_id: str, saved_step: int
) -> int:
    """In a run on live traffic, load the serving version if its step is later than the loaded checkpoint,
    because the checkpoint of its step is damaged: that step must not be repeated. Return the step of the
    weights. In other runs, later steps are repeated."""
    if not config.trains_on_live:
        return saved_step
    head = await store.latest_policy(policy_id)
    rows = await store.policy_versions(policy_id)
    step = next((row.step for row in rows if row.policy.version == head.version), saved_step)
    if step > saved_step:
        await load_version(config, backend, head, step)
    return max(step, saved_step)


async def list_kept_versions(store: Store, policy_id: str, count: int) -> list[PolicyVersion]:
    """Return the serving version, the last ``count`` promoted ones, and the candidates that may be promoted
    next, because their evaluation has begun or decided so. Engines that start load the files of the serving
    version, and a rollback needs those of the others and their checkpoints."""
    rows = await store.policy_versions(policy_id)
    serving = [row for row in rows if row.stage is PolicyStage.SERVING]
    promoted = [row for row in rows if row.promoted_at is not None]
    evaluations = await store.evaluations(policy_id)
    evaluated = {e.version for e in evaluations if e.decision in ("more data", "promote")}
    candidates = [
        row
        for row in rows
        if row.stage in (PolicyStage.SHADOW, PolicyStage.CANARY)
        or (row.stage is PolicyStage.CANDIDATE and row.policy.version in evaluated)
    ]
    return [*candidates, *serving[-1:], *promoted[-count - 1 :]]


async def tombstone_abandoned_versions(store: Store, policy_id: str, saved_step: int) -> None:
    """Tombstone the versions that were not published, or whose steps were not saved. Must run before the
    steps are released: after a crash in between, the next recovery can repeat this."""
    for version, _ in await store.reserved_versions(policy_id):
        await store.tombstone(policy_id, version, "the trainer stopped before publishing it")
    for row in await store.policy_versions(policy_id):
        # A promoted version stays, even if the checkpoint of its step is damaged: it is being served.
        if row.step > saved_step and row.promoted_at is None:
            await store.tombstone(policy_id, row.policy.version, "its step was not saved")


async def restore_published_version(store: Store, policy_id: str, saved_step: int) -> None:
    """Record the version of the saved step, in case the trainer crashed right after publishing it."""
    rows = {row.step: row for row in await store.steps(policy_id)}
    for policy, step in await store.published_policies(policy_id):
        if step == saved_step and rows[step].version is None:
            await store.advance_step(policy_id, step, rows[step].state, version=policy.version)


async def remove_outdated_artifacts(
    store: Store, config: RunConfig, policy_id: str, saved_version: int
) -> None:
    """Remove the published weights that neither engines nor a rollback need. A recovery makes the last saved
    version the head again, so its weights are kept."""
    count = config.trainer.keep_checkpoints
    saved_path = policy_path(config.get_policy_dir(policy_id), saved_version)
    kept = await list_kept_versions(store, policy_id, count)
    kept_paths = {Path(row.policy.artifact.path) for row in kept if row.policy.artifact.path}
    prune_folder(saved_path.parent, count, frozenset({saved_path, *kept_paths}))
