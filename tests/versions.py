"""Versions of policies in a store, as training steps publish them."""

from __future__ import annotations

from instar.store.base import Store
from instar.types import Artifact, Policy, PolicyStage, StepState

ARTIFACT = Artifact("adapter", "x")


async def publish_candidate(
    store: Store, policy_id: str, run_id: str = "run", artifact: Artifact = ARTIFACT
) -> int:
    """Publish a candidate whose step is committed, and return its number."""
    parent = (await store.latest_policy(policy_id)).version
    step = 1 + max((row.step for row in await store.steps(policy_id)), default=0)
    version = await store.reserve_version(policy_id, run_id, step, parent=parent, is_candidate=True)
    await store.claim_step(policy_id, step, [], run_id=run_id)
    await store.publish(Policy(policy_id, version, artifact))
    await store.advance_step(policy_id, step, StepState.COMMITTED, version=version)
    return version


async def publish_serving(
    store: Store, policy_id: str, run_id: str = "run", artifact: Artifact = ARTIFACT
) -> int:
    """Publish and promote a version, and return its number."""
    version = await publish_candidate(store, policy_id, run_id, artifact)
    await store.promote_version(policy_id, version)
    return version


async def publish_canary(
    store: Store, policy_id: str, run_id: str = "run", artifact: Artifact = ARTIFACT
) -> int:
    """Publish a version in the stage `canary`, and return its number."""
    version = await publish_candidate(store, policy_id, run_id, artifact)
    await store.advance_version(policy_id, version, PolicyStage.CANARY, "test")
    return version
