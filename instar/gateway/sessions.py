"""Which session a request belongs to, and the life of sessions."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from instar.errors import Conflict
from instar.gateway.auth import Keys, key_hash, new_key
from instar.gateway.base import (
    SAMPLING_KEYS,
    ApiError,
    CallView,
    CompleteSession,
    EndedSession,
    FailSession,
    GivenReward,
    OpenSession,
    SessionView,
    bad_request,
)
from instar.record.base import Graph
from instar.store.base import Store
from instar.types import (
    Call,
    Reward,
    RewardSource,
    Session,
    SessionStatus,
    new_id,
)

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "max_tokens": (1, math.inf),
}

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class SessionState:
    """A session at hand, with its message graph once a call needed it."""

    session: Session
    graph: Graph | None = None
    in_flight: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the admin, or one session."""

    admin: bool
    session_id: str | None

    def may_touch(self, session_id: str) -> None:
        if not self.admin and self.session_id != session_id:
            raise ApiError(403, "This key belongs to another session.", code="wrong_session")


class Sessions:
    def __init__(
        self,
        store: Store,
        keys: Keys,
        graph: Callable[[Iterable[Call]], Graph],
        *,
        run_id: str,
        agent_id: str,
        policy_id: str,
        limit: int,
    ) -> None:
        self._store = store
        self._keys = keys
        self._graph = graph
        self._run_id = run_id
        self._agent_id = agent_id
        self._policy_id = policy_id
        self._limit = limit
        self._states: OrderedDict[str, SessionState] = OrderedDict()
        self._by_key: OrderedDict[str, str] = OrderedDict()
        self._live: OrderedDict[bytes, str] = OrderedDict()

    # --- who, and which session -----------------------------------------------------------------

    async def identify(self, key: str) -> Caller:
        if self._keys.is_admin(key):
            return Caller(admin=True, session_id=None)
        hashed = key_hash(key)
        if (session_id := self._by_key.get(hashed)) is None:
            session = await self._store.session_by_key(hashed)
            if session is None or session.run_id != self._run_id:
                raise ApiError(401, "This API key is not known.", code="invalid_api_key")
            session_id = session.session_id
            _remember(self._by_key, hashed, session_id, self._limit)
        return Caller(admin=False, session_id=session_id)

    def choose(self, caller: Caller, *, url: str | None, header: str | None) -> str | None:
        """The session that a request names, by URL, key or header; all that do must agree."""
        named = [name for name in (url, caller.session_id, header) if name]
        if len(set(named)) > 1:
            raise ApiError(
                403, "The URL, the key and the header name different sessions.", code="session_conflict"
            )
        return named[0] if named else None

    async def state(self, session_id: str) -> SessionState:
        if (state := self._states.get(session_id)) is None:
            session = await self._store.session(session_id)
            if session is None or session.run_id != self._run_id:
                raise ApiError(404, f"There is no session {session_id!r}.", code="session_not_found")
            state = self._states.setdefault(session_id, SessionState(session))
            self._evict()
        self._states.move_to_end(session_id)
        return state

    async def graph_of(self, state: SessionState) -> Graph:
        async with state.loading:
            if state.graph is None:
                state.graph = self._graph(await self._store.calls(state.session.session_id))
            return state.graph

    def _evict(self) -> None:
        if len(self._states) <= self._limit:
            return
        # Not the newest: its request is about to use it.
        for session_id in [key for key in list(self._states)[:-1] if not self._states[key].in_flight]:
            del self._states[session_id]
            if len(self._states) <= self._limit:
                return

    # --- live sessions, found by what is said -----------------------------------------------------

    async def live(self, keys: Sequence[bytes]) -> SessionState:
        """The live session whose recorded call these messages continue, or a fresh one."""
        for key in reversed(keys):
            if session_id := self._live.get(key):
                state = await self.state(session_id)
                if state.session.status is SessionStatus.OPEN:
                    return state
        session, _ = await self.open(OpenSession())
        return await self.state(session.session_id)

    def remember_live(self, state: SessionState, key: bytes) -> None:
        _remember(self._live, key, state.session.session_id, 16 * self._limit)

    # --- open, end, read --------------------------------------------------------------------------

    async def open(self, asked: OpenSession) -> tuple[Session, str]:
        _check_sampling(asked.sampling)
        key = new_key()
        session = Session(
            session_id=new_id("sess"),
            run_id=self._run_id,
            agent_id=self._agent_id,
            policy_id=self._policy_id,
            channel=asked.channel,
            group_id=asked.group_id,
            slot=asked.slot,
            attempt=asked.attempt,
            task_id=asked.task_id,
            seed=asked.seed,
            sampling=asked.sampling,
            metadata={**asked.metadata, "task": asked.task} if asked.task is not None else asked.metadata,
            created_at=time.time(),
        )
        try:
            await self._store.open_session(session, key_hash(key))
        except Conflict as error:
            raise ApiError(409, str(error), code="conflict") from error
        self._states[session.session_id] = SessionState(session)
        self._evict()
        return session, key

    async def end(
        self, session_id: str, caller: Caller, asked: CompleteSession | FailSession
    ) -> EndedSession:
        caller.may_touch(session_id)
        if asked.rewards and not caller.admin:
            raise ApiError(403, "Only the admin key gives 'rewards'.", code="not_allowed", param="rewards")
        given = list(asked.rewards)
        if asked.reward is not None:
            given.insert(0, GivenReward(value=asked.reward, source=RewardSource.AGENT))
        for i, reward in enumerate(given):
            if not math.isfinite(reward.value):
                raise bad_request("A reward must be a finite number.", f"rewards[{i}].value", "invalid_value")
        state = await self.state(session_id)
        failed = isinstance(asked, FailSession)
        status = SessionStatus.FAILED if failed else SessionStatus.COMPLETED
        reason = asked.reason if isinstance(asked, FailSession) else None
        rewards = [_reward(session_id, reward) for reward in given]
        changed = await self._store.end_session(session_id, status, reason, rewards, asked.metadata)
        if changed:
            state.session = replace(state.session, status=status, reason=reason, ended_at=time.time())
            if not state.in_flight:
                self._states.pop(session_id, None)
        else:
            session = await self._store.session(session_id)
            status = session.status if session else status
        return EndedSession(session_id=session_id, status=status, changed=changed)

    async def view(self, session_id: str, caller: Caller) -> SessionView:
        caller.may_touch(session_id)
        await self.state(session_id)
        session = await self._store.session(session_id)
        assert session is not None, "sessions are never deleted"
        return SessionView(
            session_id=session.session_id,
            run_id=session.run_id,
            agent_id=session.agent_id,
            policy_id=session.policy_id,
            channel=session.channel,
            status=session.status,
            group_id=session.group_id,
            slot=session.slot,
            attempt=session.attempt,
            task_id=session.task_id,
            reason=session.reason,
            metadata=session.metadata,
            created_at=session.created_at,
            ended_at=session.ended_at,
            calls=[_call_view(call) for call in await self._store.calls(session_id)],
            rewards=[
                GivenReward(r.value, r.source, r.scorer, r.call_id, r.detail)
                for r in await self._store.rewards(session_id)
            ],
        )


def _check_sampling(sampling: dict[str, Any]) -> None:
    for name, value in sampling.items():
        if name not in SAMPLING_KEYS:
            known = ", ".join(sorted(SAMPLING_KEYS))
            raise bad_request(f"A session cannot force {name!r}; it can force {known}.", f"sampling.{name}")
        whole = name in ("top_k", "max_tokens")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < 0:
            raise bad_request(f"'sampling.{name}' is not a number of its kind.", f"sampling.{name}")
        low, high = SAMPLING_RANGES.get(name, (0, math.inf))
        if not low <= value <= high:
            raise bad_request(f"'sampling.{name}' is {value}, out of range.", f"sampling.{name}")


def _reward(session_id: str, given: GivenReward) -> Reward:
    return Reward(
        session_id=session_id,
        value=given.value,
        source=given.source,
        scorer=given.scorer,
        call_id=given.call_id,
        detail=given.detail,
        created_at=time.time(),
    )


def _call_view(call: Call) -> CallView:
    return CallView(
        call_id=call.call_id,
        parent_id=call.parent_id,
        link=call.link,
        status=call.status,
        trainable=call.trainable,
        reason=call.reason,
        finish_reason=call.finish_reason,
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.sampled_ids),
        reply=dict(call.reply),
    )


def _remember(table: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
