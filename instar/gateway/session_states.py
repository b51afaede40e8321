"""The sessions in memory, with their message graphs and pending requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import islice

from instar.gateway.auth import Action, Caller, authorize
from instar.gateway.base import ApiError
from instar.gateway.context import GatewayContext
from instar.record.graph import MessageGraph
from instar.types import Channel, Session, SessionStatus, new_id

_MAX_EVICTION_CANDIDATES = 64
_ACTIVE_SECONDS = 60.0
"""A session is active for this long after a call."""
_BYTES_PER_SESSION = 512 * 1024
"""The average memory of a session above which sessions are evicted early: that of 120,000 tokens."""


@dataclass(slots=True)
class PendingRequest:
    """A request whose reply is not recorded yet."""

    client_key: str | None
    done: asyncio.Future[None]
    client_disconnected: bool = False
    """True if the client disconnected while its complete reply was being recorded or sent."""


@dataclass(slots=True)
class SessionState:
    """A session in memory. The first call loads its message graph."""

    session: Session
    """The session without its metadata, which may be large and is only in the store."""
    unsaved_session: Session | None = None
    """The session if it is not stored yet, otherwise None. It is stored together with its first call."""
    is_matched_by_content: bool = False
    """True if later calls may be matched to the session by content. False for sessions that requests name,
    because several of them may have the same messages."""
    graph: MessageGraph | None = None
    counted_size: int = 0
    """The size of the graph in ``SessionStates.size``, in bytes."""
    in_flight: int = 0
    used_at: float = 0.0
    """The Unix time at which the session's last call in this process ended; 0 if there was none."""
    recorded_users: tuple[str, ...] = ()
    """The user ids in the last recorded request, which need not be recorded again."""
    pending: dict[bytes, list[PendingRequest]] = field(default_factory=dict[bytes, list[PendingRequest]])
    """The pending requests by `Placement.key`, which is the same for equal requests."""
    graph_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _CallTracker:
    """Counts a session's calls in flight. A class, because a generator-based context manager is slower."""

    _states: SessionStates
    _state: SessionState

    def __enter__(self) -> None:
        self._state.in_flight += 1

    def __exit__(self, *_: object) -> None:
        state = self._state
        state.in_flight -= 1
        state.used_at = time.time()
        if state.unsaved_session is not None and not state.in_flight:
            self._states.remove(state.session.session_id)
        else:
            self._states.count_size(state)


def session_not_found(session_id: str) -> ApiError:
    return ApiError(404, f"This run has no session {session_id!r}.", code="session_not_found")


class SessionStates:
    def __init__(self, context: GatewayContext) -> None:
        self._live = context.live
        self._store = context.store
        self._identity = context.identity
        self._hasher = context.hasher
        self._limit = context.config.max_sessions_in_memory
        self._max_size = self._limit * _BYTES_PER_SESSION
        self._states: OrderedDict[str, SessionState] = OrderedDict()
        self.size = 0
        """The approximate memory of all message graphs, in bytes."""

    def __len__(self) -> int:
        return len(self._states)

    async def get(self, session_id: str, caller: Caller, action: Action) -> SessionState:
        """Return the session. Raise ApiError if it is not in the run (404) or access is denied (403)."""
        if (state := await self.find(session_id)) is None:
            raise session_not_found(session_id)
        authorize(caller, action, state.session)
        return state

    async def get_open(self, session_id: str, caller: Caller, action: Action) -> SessionState:
        """Like `get`, but also raise ApiError (410) if the session has ended."""
        state = await self.get(session_id, caller, action)
        if state.session.status is not SessionStatus.OPEN:
            message = f"The session {session_id!r} has ended; open a new one."
            raise ApiError(410, message, code="session_ended")
        return state

    async def find_open(self, session_id: str) -> SessionState | None:
        """Return the session, or None if it does not exist or has ended."""
        state = await self.find(session_id) if session_id else None
        return state if state and state.session.status is SessionStatus.OPEN else None

    async def find(self, session_id: str) -> SessionState | None:
        if (state := self._states.get(session_id)) is None:
            session = await self._store.session(session_id)
            if session is None or session.run_id != self._identity.run_id:
                return None
            state = self._states.get(session_id) or self.add(session)
        self._states.move_to_end(session_id)
        return state

    def add(self, session: Session) -> SessionState:
        """Add a stored session."""
        return self._add(SessionState(replace(session, metadata={})))

    def create(self, agent_id: str, external_id: str | None) -> SessionState:
        """Create a live session, which is stored together with its first call."""
        session_id, identity, live = new_id("sess"), self._identity, self._live
        policy_id = identity.agent_policies.get(agent_id, identity.policy_id)
        session = Session(
            session_id=session_id,
            run_id=identity.run_id,
            agent_id=agent_id,
            policy_id=policy_id,
            channel=Channel.LIVE,
            external_id=external_id,
            created_at=time.time(),
            canary_version=None if live is None else live.assign_canary(policy_id, session_id),
        )
        return self._add(SessionState(session, unsaved_session=session, graph=MessageGraph(self._hasher)))

    def remove(self, session_id: str) -> None:
        if (state := self._states.pop(session_id, None)) is not None:
            self.size -= state.counted_size
            state.counted_size = 0

    async def refresh(self, session_id: str) -> None:
        """Read the session from the store again, after it was ended there, if it is in memory."""
        if (state := self._states.get(session_id)) is None:
            return
        if (session := await self._store.session(session_id)) is not None:
            state.session = replace(session, metadata={})
        if not state.in_flight:
            self.remove(session_id)

    def count_size(self, state: SessionState) -> None:
        """Update the total size after the session's graph has grown, and evict sessions if necessary."""
        if state.graph is not None and state.session.session_id in self._states:
            self.size += state.graph.size - state.counted_size
            state.counted_size = state.graph.size
            self._evict()

    def track_call(self, state: SessionState) -> _CallTracker:
        """Return a context manager that counts a call as in flight. On exit, the session is dropped if it is
        not stored and has no other call in flight."""
        return _CallTracker(self, state)

    async def load_graph(self, state: SessionState) -> MessageGraph:
        if state.graph is None:
            async with state.graph_lock:
                if state.graph is None:
                    rows = await self._store.call_deltas(state.session.session_id)
                    state.graph = MessageGraph(self._hasher, rows)
        return state.graph

    def _add(self, state: SessionState) -> SessionState:
        self._states[state.session.session_id] = state
        self._evict()
        return state

    @property
    def _is_full(self) -> bool:
        return len(self._states) > self._limit or self.size > self._max_size

    def _evict(self) -> None:
        if not self._is_full:
            return
        # Keep the newest session, which is about to be used, and unsaved sessions, which cannot be reloaded.
        newest = next(reversed(self._states))
        for session_id in self._list_eviction_candidates():
            state = self._states[session_id]
            if session_id != newest and not state.in_flight and state.unsaved_session is None:
                self.remove(session_id)
                if not self._is_full:
                    return

    def _list_eviction_candidates(self) -> list[str]:
        """Return the sessions that were unused for longest or, if even these are active, the less recently
        used ones of random pairs. If more sessions than fit into memory take turns, the one that was unused
        for longest is used next, so every call would have to load its session. Entirely random candidates
        would include sessions in use, even if their agents have left most of the others."""
        oldest = list(islice(self._states, _MAX_EVICTION_CANDIDATES))
        if time.time() - self._states[oldest[0]].used_at > _ACTIVE_SECONDS:
            return oldest
        ids, count = list(self._states), len(self._states)
        older_of_pairs = [ids[min(random.randrange(count), random.randrange(count))] for _ in oldest]
        # The older sessions may all have a call in flight, so random ones follow.
        return list(dict.fromkeys([*older_of_pairs, *random.sample(ids, len(oldest))]))
