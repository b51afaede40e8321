"""Run one slot of a group: an agent's session from start to end, with retries and refills.

After a transient error (a lost connection, status 429, 502 or 503), a new session is started, up to
`rollout.retries` times. Any other error in an agent fails its session. An error from the gateway's control
API stops the rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from instar.async_utils import run_to_completion, run_with_timeout
from instar.config import RolloutConfig, SamplingConfig
from instar.errors import AgentError, AgentTimeout, EngineUnavailable
from instar.gateway.base import OpenSession
from instar.http.retry import RetryPolicy
from instar.rewards.base import RolloutScoring, ScoringResult, Transcript, describe_error
from instar.rollout.base import Agent, AgentResult, AgentSession
from instar.rollout.gateway_client import GatewayClient
from instar.store.base import Store
from instar.types import Group, Session, SessionStatus

logger = logging.getLogger(__name__)
T = TypeVar("T")

RETRY = RetryPolicy(first_delay=0.5)
TRANSIENT_STATUSES = (429, 502, 503)
TRANSIENT_CODES = ("unavailable", "engine_error", "store_error")
"""The gateway's error codes for the statuses 502 and 503. An error inside a stream can only be recognized by
its code, because the status was already sent as 200."""
CANCEL_GRACE_SECONDS = 5.0
"""How long a cancelled agent has to stop before it is abandoned."""


@dataclass(frozen=True, slots=True)
class RolloutSlot:
    group: Group
    number: int
    attempt: int = 0
    refills: int = 0
    """The number of failed sessions in this slot that were already replaced."""
    seed_index: int | None = None
    """If set, session seeds are derived from this index instead of the group's index."""


@dataclass(frozen=True, slots=True)
class SlotResult:
    session_id: str
    status: SessionStatus
    reason: str | None = None
    """Why the session failed, was abandoned or could not be scored, or None."""
    reward: float | None = None

    @property
    def is_unusable(self) -> bool:
        """True if the session failed, or if its scoring failed without a reward."""
        failed = self.status is SessionStatus.FAILED
        return failed or (self.reason is not None and self.reward is None)


@dataclass
class RolloutCounters:
    running: int = 0
    completed: int = 0
    failed: int = 0
    abandoned: int = 0
    unscored: int = 0
    """The number of completed sessions whose scoring failed."""
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class RolloutServices:
    store: Store
    gateway: GatewayClient
    agent: Agent
    scoring: RolloutScoring


def derive_seed(*parts: object) -> int:
    """Return a number in 0..2**31-1 that depends only on ``parts``."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(eq=False, repr=False)
class SlotRunner:
    config: RolloutConfig
    seed: int
    services: RolloutServices
    sampling: SamplingConfig

    def __post_init__(self) -> None:
        self.store, self.gateway = self.services.store, self.services.gateway
        self.session_sampling = self.sampling.model_dump(include=set(SamplingConfig.model_fields))
        self.counters = RolloutCounters()
        self.semaphore = asyncio.Semaphore(self.config.concurrency)

    async def run(self, slot: RolloutSlot) -> SlotResult:
        """Run sessions until one is neither retried nor replaced, and return its result."""
        attempt, refills, retries = slot.attempt, slot.refills, 0
        can_refill = self.config.group_policy == "refill"
        while True:
            async with self.semaphore:
                result = await self._run_once(slot, attempt, refills, is_last=retries >= self.config.retries)
            if result.status is SessionStatus.ABANDONED:
                await asyncio.sleep(RETRY.delay(retries))
                retries += 1
            elif result.status is SessionStatus.FAILED and can_refill and refills < self.config.refills:
                refills += 1
            else:
                return result
            attempt += 1

    async def _run_once(self, slot: RolloutSlot, attempt: int, refill: int, *, is_last: bool) -> SlotResult:
        group = slot.group
        seed_index = group.index if slot.seed_index is None else slot.seed_index
        # A retry after a transient error uses the same seed; a refill uses a new seed.
        refill_part = (f"refill-{refill}",) if refill else ()
        request = OpenSession(
            channel=group.channel,
            task_id=group.task.task_id,
            group_id=group.group_id,
            slot=slot.number,
            attempt=attempt,
            seed=derive_seed(self.seed, group.channel, seed_index, slot.number, *refill_part),
            sampling=self.session_sampling,
        )
        session = await self.gateway.open_session(request)
        self.counters.running += 1
        try:
            return await self._run_session(slot, session, is_last=is_last)
        except asyncio.CancelledError:
            await run_to_completion(self._abandon(session.session_id, "interrupted"))
            raise
        finally:
            self.counters.running -= 1

    async def _run_session(self, slot: RolloutSlot, session: AgentSession, *, is_last: bool) -> SlotResult:
        task, session_id = slot.group.task, session.session_id
        try:
            agent_run = self.services.agent.run(task, session)
            result = await run_agent_with_timeout(self.config.timeout, agent_run, "the agent")
        except Exception as error:  # noqa: BLE001 — an agent is user code and may raise any exception
            reason = describe_error(error)
            if is_transient(error) and not is_last:
                return await self._abandon(session_id, f"transient: {reason}")
            ended = await self.gateway.fail_session(session_id, reason, self.config.failed_reward)
            if ended.status is not SessionStatus.COMPLETED:
                return self._count_failure(session_id, reason)
            # The agent completed the session before it failed. The session is scored, because an agent could
            # otherwise avoid a low reward.
            result = AgentResult()
        calls = await self.store.calls(session_id)
        scoring = await self.services.scoring.score(task, Transcript(session_id, calls, result.reward))
        return await self._complete(session_id, scoring, result)

    async def _complete(self, session_id: str, scoring: ScoringResult, result: AgentResult) -> SlotResult:
        metadata = dict(result.metadata) | ({} if result.turns is None else {"turns": result.turns})
        ended = await self.gateway.complete_session(session_id, scoring.rewards, metadata, scoring.scores)
        if ended.status is not SessionStatus.COMPLETED:
            return self._count_failure(session_id, f"the session had already ended: {ended.status}")
        if not ended.changed:
            # The session had already ended: the agent completed it, or the response to an earlier request was
            # lost. In the second case, recording the scores again changes nothing.
            await self.store.record_scores(scoring.scores, scoring.rewards)
        self.counters.completed += 1
        reason = None if scoring.failure_reason is None else f"reward: {scoring.failure_reason}"
        if reason is not None:
            self.counters.unscored += 1
            self.counters.last_failure = reason
        value = next((reward.value for reward in scoring.rewards if reward.call_id is None), None)
        return SlotResult(session_id, SessionStatus.COMPLETED, reason, value)

    def _count_failure(self, session_id: str, reason: str) -> SlotResult:
        logger.warning("session %s failed: %s", session_id, reason)
        self.counters.failed += 1
        self.counters.last_failure = reason
        return SlotResult(session_id, SessionStatus.FAILED, reason, self.config.failed_reward)

    async def _abandon(self, session_id: str, reason: str) -> SlotResult:
        # Written directly to the store, because the gateway may be unavailable.
        await self.store.end_session(session_id, SessionStatus.ABANDONED, reason)
        self.counters.abandoned += 1
        return SlotResult(session_id, SessionStatus.ABANDONED, reason)


async def run_agent_with_timeout(seconds: float, coroutine: Coroutine[Any, Any, T], name: str) -> T:
    """Return the coroutine's result. Raises AgentTimeout after ``seconds``, and AgentError if the coroutine
    cancels itself. The messages contain ``name``."""
    return await run_with_timeout(
        seconds,
        coroutine,
        grace_seconds=CANCEL_GRACE_SECONDS,
        timeout_error=AgentTimeout(f"{name} did not finish within {seconds:g} s"),
        cancel_error=AgentError(f"{name} cancelled itself"),
    )


def is_transient(error: BaseException) -> bool:
    """Return True if a retry may succeed: a connection was lost, there were too many requests, or a server
    was not ready. The causes of the error are also checked, because SDKs wrap transport errors."""
    clients = (sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules)
    connection_errors: tuple[type[BaseException], ...] = (
        ConnectionError,
        aiohttp.ClientConnectionError,
        EngineUnavailable,
        *(client.TransportError for client in clients),
    )
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        status = getattr(cause, "status_code", None) or getattr(cause, "status", None)
        has_transient_code = getattr(cause, "code", None) in TRANSIENT_CODES
        if isinstance(cause, connection_errors) or status in TRANSIENT_STATUSES or has_transient_code:
            return True
        cause = cause.__cause__
    return False


async def abandon_open_sessions(store: Store, group: Group, agent_id: str, reason: str) -> list[Session]:
    """End the group's open sessions as abandoned, and return all its sessions as they were before that."""
    sessions = (await store.group_sessions([group], agent_id))[group.group_id]
    for session in sessions:
        if session.status is SessionStatus.OPEN:
            await store.end_session(session.session_id, SessionStatus.ABANDONED, reason)
    return sessions
