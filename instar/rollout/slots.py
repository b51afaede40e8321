"""One slot of a group: an agent's session from opening to its end, and again when that is called for.

A transient fault (a connection lost, 429, 503) abandons the session and tries anew; any other fault
of the agent is its failure, recorded with the reason. A fault of the control API itself is not the
agent's: it is raised, and stops the rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from instar import async_utils
from instar.config import RolloutConfig, SamplingConfig
from instar.errors import AgentError, AgentTimeout, EngineUnavailable, InstarError
from instar.rewards.base import RolloutScoring, ScoringResult, Transcript
from instar.rollout.base import Agent, AgentResult, AgentSession
from instar.rollout.gateway_client import GatewayClient, backoff
from instar.store.base import Store
from instar.types import Group, SessionStatus

log = logging.getLogger(__name__)
T = TypeVar("T")

TRANSIENT_STATUS = (429, 502, 503)
GRACE = 5.0
"""Seconds an agent has to end after it was cancelled."""
REASON_KEPT = 1000


@dataclass(frozen=True, slots=True)
class RolloutSlot:
    group: Group
    number: int
    attempt: int = 0
    """Number of the next attempt."""
    refills: int = 0
    """Further sessions already spent on it."""
    seed_index: int | None = None
    """What its seed is derived from. Default: the group's index."""


@dataclass(frozen=True, slots=True)
class SlotResult:
    session_id: str
    status: SessionStatus
    reason: str | None = None
    """Why it failed, or why a scorer gave up on it."""
    reward: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it came to nothing."""
        failed = self.status is SessionStatus.FAILED
        return failed or (self.reason is not None and self.reward is None)


@dataclass
class RolloutCounters:
    running: int = 0
    completed: int = 0
    failed: int = 0
    abandoned: int = 0
    unscored: int = 0
    """Completed, and a scorer gave up on them."""
    last_failure: str = ""


def derive_seed(*parts: object) -> int:
    """A stable number in 0..2**31-1 from a path of names and numbers."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class SlotRunner:
    def __init__(
        self,
        config: RolloutConfig,
        seed: int,
        store: Store,
        gateway: GatewayClient,
        agent: Agent,
        scoring: RolloutScoring,
        *,
        sampling: SamplingConfig | None = None,
        counters: RolloutCounters | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.store = store
        self.gateway = gateway
        self.agent = agent
        self.scoring = scoring
        self.sampling = (sampling or config.sampling).model_dump(include=set(SamplingConfig.model_fields))
        self.counters = counters or RolloutCounters()
        self.limit = asyncio.Semaphore(config.concurrency)

    async def run(self, slot: RolloutSlot) -> SlotResult:
        """Until the slot has its final session."""
        attempt, refills, retries = slot.attempt, slot.refills, 0
        while True:
            async with self.limit:
                outcome = await self._attempt(slot, attempt, refills, last=retries >= self.config.retries)
            if outcome.status is SessionStatus.ABANDONED:
                await asyncio.sleep(backoff(retries, first=0.5))
                retries += 1
            elif outcome.status is SessionStatus.FAILED and self._may_refill(refills):
                refills += 1
            else:
                return outcome
            attempt += 1

    def _may_refill(self, refills: int) -> bool:
        return self.config.group_policy == "refill" and refills < self.config.refills

    async def _attempt(self, slot: RolloutSlot, attempt: int, refill: int, *, last: bool) -> SlotResult:
        group = slot.group
        place = group.index if slot.seed_index is None else slot.seed_index
        # Another attempt after a transient fault repeats the draw; a refill is another draw.
        again = (f"refill-{refill}",) if refill else ()
        session = await self.gateway.open_session(
            channel=group.channel,
            task_id=group.task.task_id,
            group_id=group.group_id,
            slot=slot.number,
            attempt=attempt,
            seed=derive_seed(self.seed, group.channel, place, slot.number, *again),
            sampling=self.sampling,
        )
        self.counters.running += 1
        try:
            return await self._play(slot, session, last=last)
        except asyncio.CancelledError:
            await asyncio.shield(self._abandon(session.session_id, "interrupted"))
            raise
        finally:
            self.counters.running -= 1

    async def _play(self, slot: RolloutSlot, session: AgentSession, *, last: bool) -> SlotResult:
        task = slot.group.task
        try:
            result = await run_with_timeout(self.config.timeout, self.agent.run(task, session), "the agent")
        except Exception as error:  # noqa: BLE001 — an agent is foreign code: whatever it raises is its failure
            if is_transient(error) and not last:
                return await self._abandon(session.session_id, f"transient: {describe_error(error)}")
            return await self._fail(session.session_id, describe_error(error))
        calls = await self.store.calls(session.session_id)
        verdict = await self.scoring.score(task, Transcript(session.session_id, calls, result.reward))
        return await self._complete(session.session_id, verdict, result)

    async def _complete(self, session_id: str, verdict: ScoringResult, result: AgentResult) -> SlotResult:
        metadata = dict(result.metadata) | ({} if result.turns is None else {"turns": result.turns})
        ended = await self.gateway.complete_session(session_id, verdict.rewards, metadata, verdict.scores)
        if ended.status is not SessionStatus.COMPLETED:
            return self._failed(session_id, "ended by the agent itself")
        if not ended.changed:
            # It had ended before it was scored: the agent completed it itself, or the answer to our first try
            # was lost, and then this changes nothing.
            await self.store.record_scores(verdict.scores, verdict.rewards)
        self.counters.completed += 1
        reason = None if verdict.failure_reason is None else f"reward: {verdict.failure_reason}"
        if reason is not None:
            self.counters.unscored += 1
            self.counters.last_failure = reason
        value = next((reward.value for reward in verdict.rewards if reward.call_id is None), None)
        return SlotResult(session_id, SessionStatus.COMPLETED, reason, value)

    async def _fail(self, session_id: str, reason: str) -> SlotResult:
        await self.gateway.fail_session(session_id, reason, self.config.failed_reward)
        return self._failed(session_id, reason)

    def _failed(self, session_id: str, reason: str) -> SlotResult:
        log.warning("session %s failed: %s", session_id, reason)
        self.counters.failed += 1
        self.counters.last_failure = reason
        return SlotResult(session_id, SessionStatus.FAILED, reason, self.config.failed_reward)

    async def _abandon(self, session_id: str, reason: str) -> SlotResult:
        """Straight to the store: the gateway may be what is away."""
        await self.store.end_session(session_id, SessionStatus.ABANDONED, reason)
        self.counters.abandoned += 1
        return SlotResult(session_id, SessionStatus.ABANDONED, reason)


async def run_with_timeout(seconds: float, work: Coroutine[Any, Any, T], what: str) -> T:
    """The work's result, or AgentTimeout. Work that does not end when cancelled is left behind."""
    return await async_utils.run_with_deadline(
        seconds,
        work,
        grace=GRACE,
        on_timeout=AgentTimeout(f"{what} ran past its deadline of {seconds:g} s"),
        on_cancel=AgentError(f"{what} cancelled itself"),
    )


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. The first error cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_transient(error: BaseException) -> bool:
    """Whether the same again may work: a lost connection, too many requests, a server not ready. Looks
    through what wraps the cause, for an SDK raises its own error from the transport's."""
    httpx = sys.modules.get("httpx")
    lost: tuple[type[BaseException], ...] = (
        ConnectionError,
        aiohttp.ClientConnectionError,
        EngineUnavailable,
        *((httpx.TransportError,) if httpx else ()),
    )
    for cause in _causes(error):
        status = getattr(cause, "status_code", None) or getattr(cause, "status", None)
        if isinstance(cause, lost) or status in TRANSIENT_STATUS:
            return True
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def describe_error(error: BaseException) -> str:
    """The reason that is recorded. Our own errors say it all; others need their name."""
    text = str(error) if isinstance(error, InstarError) else f"{type(error).__name__}: {error}"
    return text.strip()[:REASON_KEPT]
