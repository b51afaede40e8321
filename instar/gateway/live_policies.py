"""The versions of the agents' policies that answer live requests.

The store says which versions serve. A version is loaded into the engines before a request names it, so that
no request waits for it. A promotion or rollback applies to every request that starts after it was read from
the store. A request ends under the version with which it started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from instar.config import CanaryConfig
from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, PoliciesInUse, StoreError
from instar.store.base import Store
from instar.types import Artifact, Channel, Policy, PolicyRef, PolicyStage, Session

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 0.5
RETRY_SECONDS = 5.0
"""The time until a version that could not be loaded is loaded again."""
BUSY_RETRY_SECONDS = 0.2
"""The pause before a version is loaded again if the engine could not unload another one for it."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    initial: Artifact = Artifact("base")  # noqa: RUF009 - frozen, so it can be shared
    """The artifact of version 0, from which every policy starts."""


@dataclass(eq=False, slots=True)
class ServedPolicy:
    """The versions of one policy that are loaded."""

    policy_id: str
    serving: Policy | None = None
    """The version of all sessions that no canary serves, or None until the first one is loaded."""
    canary: Policy | None = None
    shadow: Policy | None = None
    targets: Mapping[PolicyStage, Policy] | None = None
    """The versions that the store names; None until it was read."""
    problem: str = ""
    """Why a version that the store names is not loaded; empty if all are."""
    retry_at: float = 0.0
    update: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after the first update."""


class LivePolicies:
    """Chooses the version that answers a request. Run `run` in the background."""

    def __init__(self, store: Store, engine: Engine, policy_ids: Sequence[str], options: LiveOptions) -> None:
        self._store = store
        self._engine = engine
        self._options = options
        self._by_id = {policy_id: ServedPolicy(policy_id) for policy_id in policy_ids}

    @property
    def problem(self) -> str:
        """Why versions that the store names are not loaded, or an empty string."""
        return "; ".join(served.problem for served in self._by_id.values() if served.problem)

    def get(self, policy_id: str) -> ServedPolicy:
        return self._by_id[policy_id]

    def assign_canary(self, policy_id: str, session_id: str) -> int | None:
        """Return the canary version that serves a new live session, or None. The share of the sessions that
        it serves is chosen by a hash, so that it does not depend on their order."""
        canary = self._by_id[policy_id].canary
        if canary is None or not is_selected(self._options.canary.share, session_id, canary.version):
            return None
        return canary.version

    async def choose(self, policy_id: str, session: Session) -> Policy:
        """Return the version that answers a request now. Raise EngineUnavailable if none could be loaded."""
        served = self._by_id[policy_id]
        while served.serving is None:
            if served.problem:
                raise EngineUnavailable(served.problem)
            await served.changed.wait()
        canary = served.canary
        is_canary = canary is not None and canary.version == session.canary_version
        if canary is not None and is_canary and session.channel is Channel.LIVE:
            return canary
        return served.serving

    async def restore(self, policy: Policy) -> Policy:
        """Load a version again that the engine does not have any more, because it restarted or had to load
        other ones. Return the version with which the request continues: if a canary cannot be loaded, this is
        the serving version."""
        try:
            await self._load_when_possible(policy)
        except EngineError as error:
            serving = self._by_id[policy.policy_id].serving
            if serving is None or policy == serving:
                raise
            logger.warning("%s cannot be loaded; %s replies instead: %s", policy.ref, serving.ref, error)
            await self._load_when_possible(serving)
            return serving
        return policy

    async def _load_when_possible(self, policy: Policy) -> None:
        while True:
            try:
                return await self.load(policy)
            except PoliciesInUse:  # the request's deadline limits how often this is repeated
                await asyncio.sleep(BUSY_RETRY_SECONDS)

    async def load(self, policy: Policy) -> None:
        """Make the engines load the version, unless they have it."""
        if policy.version or policy.artifact.kind != "base":  # engines always have the base model
            await self._engine.keep(await self._engine.upload_files(policy))

    async def run(self) -> None:
        """Follow the versions that the store names."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    rows = await self._store.active_versions(list(self._by_id))
                except StoreError as error:
                    logger.warning("Could not read which versions serve, will retry: %s", error)
                else:
                    by_id: dict[str, dict[PolicyStage, Policy]] = {policy_id: {} for policy_id in self._by_id}
                    for row in rows:
                        by_id[row.policy.policy_id][row.stage] = row.policy
                    for policy_id, served in self._by_id.items():
                        self._start_update(tasks, served, by_id[policy_id])
                await asyncio.sleep(POLL_INTERVAL_SECONDS)

    def _start_update(
        self, tasks: asyncio.TaskGroup, served: ServedPolicy, targets: Mapping[PolicyStage, Policy]
    ) -> None:
        is_retry_due = bool(served.problem) and time.monotonic() >= served.retry_at
        if served.targets != targets:
            if served.update is not None:
                served.update.cancel()  # a rollback must not wait until a canary is loaded
            served.targets = targets
        elif not is_retry_due or (served.update is not None and not served.update.done()):
            return
        served.update = tasks.create_task(self._update(served, targets))

    async def _update(self, served: ServedPolicy, targets: Mapping[PolicyStage, Policy]) -> None:
        head = targets.get(PolicyStage.SERVING) or Policy(served.policy_id, 0, self._options.initial)
        canary, shadow = targets.get(PolicyStage.CANARY), targets.get(PolicyStage.SHADOW)
        # Until a promoted canary serves all sessions, it continues to serve its own. So does one that was
        # exported again, until its new artifact is loaded.
        if _get_ref(served.canary) not in (_get_ref(canary), head.ref):
            served.canary = None
        if _get_ref(served.shadow) != _get_ref(shadow):
            served.shadow = None
        problems: list[str] = []
        for name, policy in (("serving", head), ("canary", canary), ("shadow", shadow)):
            if policy != getattr(served, name):
                problem = await self._switch(served, name, policy)
                problems += [problem] if problem else []
        problem = "; ".join(problems)
        if problem and problem != served.problem:
            logger.warning("%s", problem)
        served.problem, served.retry_at = problem, time.monotonic() + RETRY_SECONDS
        served.changed.set()

    async def _switch(self, served: ServedPolicy, name: str, policy: Policy | None) -> str:
        """Load the version and use it as ``name``. Return why it cannot be loaded, or an empty string."""
        try:
            if policy is not None:
                await self.load(policy)
        except EngineError as error:
            previous = getattr(served, name)
            fallback = f"; {previous.ref} continues to serve" if previous is not None else ""
            return f"{policy.ref if policy else ''} ({name}) cannot be loaded: {error}{fallback}"
        setattr(served, name, policy)
        if policy is not None:
            logger.info("%s is now used as: %s", policy.ref, name)
        return ""


def _get_ref(policy: Policy | None) -> PolicyRef | None:
    return None if policy is None else policy.ref


def is_selected(share: float, name: str, version: int) -> bool:
    """Return True if a share of all names that includes this one is used for the version."""
    digest = blake2b(f"{name}/{version}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
