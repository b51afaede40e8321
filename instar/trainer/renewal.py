"""Exports the versions of live policies again before their samplers on a training service expire.

The artifact of a version changes, but neither its number nor its weights, which are those of the checkpoint
of its step. A crash at any point leaves the previous artifact in the store, and the next trainer repeats the
renewal.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from instar.backends.base import Backend
from instar.config import RunConfig
from instar.errors import InstarError
from instar.store.base import PolicyVersion, Store
from instar.trainer import lineage
from instar.trainer.checkpoint import policy_path
from instar.trainer.publishing import RENEWAL_LIFETIME_FRACTION
from instar.types import Policy, PolicyRef

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0


@dataclass(eq=False)
class SamplerRenewals:
    config: RunConfig
    store: Store
    backend: Backend
    _retry_times: dict[PolicyRef, float] = field(default_factory=dict[PolicyRef, float], init=False)
    """When the renewals that failed may be repeated, on the clock of `time.monotonic`."""

    async def list_due(self, policy_id: str) -> list[PolicyVersion]:
        """Return the versions that serve or may serve, and whose samplers expire soon or have expired."""
        lifetime = self.backend.artifact_lifetime_seconds
        if lifetime is None:
            return []
        limit = time.time() + (1 - RENEWAL_LIFETIME_FRACTION) * lifetime
        rows = await self.store.policy_versions(policy_id)
        expiring = {row.policy.version for row in rows if (row.policy.artifact.expires_at or limit) < limit}
        if not expiring:
            return []
        kept = await lineage.list_kept_versions(self.store, policy_id, self.config.trainer.keep_checkpoints)
        newest_candidate = [row for row in rows if row.stage.is_pending][-1:]
        due = {row.policy.version: row for row in [*kept, *newest_candidate]}
        return [row for version, row in sorted(due.items()) if version in expiring and self._may_try(row)]

    def _may_try(self, row: PolicyVersion) -> bool:
        return self._retry_times.get(row.policy.ref, 0.0) <= time.monotonic()

    async def renew(self, row: PolicyVersion) -> None:
        """Load the version into the backend and export it. Raises InstarError if its checkpoint is missing or
        the backend fails. The version is then not due for some time."""
        policy = row.policy
        self._retry_times[policy.ref] = time.monotonic() + RETRY_SECONDS
        await self._check_checkpoint(row)
        logger.info("exporting %s again before its sampler expires", policy.ref)
        await lineage.load_version(self.config, self.backend, policy, row.step)
        path = policy_path(self.config.get_policy_dir(policy.policy_id), policy.version)
        artifact = await self.backend.publish(path)
        await self.store.publish(Policy(policy.policy_id, policy.version, artifact))
        del self._retry_times[policy.ref]

    async def _check_checkpoint(self, row: PolicyVersion) -> None:
        """Raise InstarError if the step was repeated since, so that its checkpoint has other weights."""
        if row.step == lineage.INITIAL_STEP:
            return
        rows = {r.policy.version: r for r in await self.store.policy_versions(row.policy.policy_id)}
        source = row  # the version that was trained in the step; a rollback serves it under other numbers
        while (parent := rows.get(source.parent or 0)) is not None and parent.step == row.step:
            source = parent
        versions = {step.step: step.version for step in await self.store.steps(row.policy.policy_id)}
        if versions.get(row.step) != source.policy.version:
            name = f"version {source.policy.version}"
            raise InstarError(f"the checkpoint of step {row.step} does not have the weights of {name}")
