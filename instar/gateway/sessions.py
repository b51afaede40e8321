"""Which session a request belongs to, and the life of sessions."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain as chain_iterables
from itertools import islice
from typing import TypeVar

from instar.errors import ConflictError
from instar.gateway.auth import Authenticator, Caller, hash_key, new_key
from instar.gateway.base import (
    ApiError,
    CompleteSession,
    EndedSession,
    FailSession,
    OpenSession,
    RewardBody,
    SessionView,
    bad_request,
)
from instar.gateway.client_headers import RetryEvidence
from instar.gateway.session_index import SessionIndex, remember
from instar.gateway.views import check_sampling, reward_row, score_row, session_view
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain, MessageHasher
from instar.record.redact import Redactor
from instar.store.base import Store
from instar.types import (
    Call,
    Channel,
    Message,
    RewardSource,
    Session,
    SessionStatus,
    new_id,
)

_TAILS = 64
"""Recorded calls looked for in the store, by how much of the messages they say; the longest first."""
_EVICTED = 64
"""Sessions looked at when room is needed."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class SessionState:
    """A session at hand, with its message graph once a call needed it."""

    session: Session
    opening: Session | None = None
    """Set while it is not in the store yet: it is opened with its first call."""
    unnamed: bool = False
    """Whether its calls are told by what they say alone. Those of other sessions are not looked for by it: a
    session with the same opening must not get between."""
    graph: MessageGraph | None = None
    in_flight: int = 0
    used_at: float = 0.0
    """When its last call ended, where that was seen."""
    pending: dict[bytes, list[Pending]] = field(default_factory=dict[bytes, "list[Pending]"])
    """Requests that are being answered, by the keys of their placements."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take_opening(self) -> Session | None:
        opening, self.opening = self.opening, None
        return opening


@dataclass(slots=True)
class Pending:
    """A request that is being answered."""

    client_key: str | None
    ended: asyncio.Future[None]
    client_gone: bool = False
    """Set when its reply is whole and being recorded, and nobody is left to be given it."""


class Answering:
    """A context manager; not a generator, for it is entered with every call."""

    __slots__ = ("_state", "_states")

    def __init__(self, states: dict[str, SessionState], state: SessionState) -> None:
        self._states = states
        self._state = state

    def __enter__(self) -> None:
        self._state.in_flight += 1

    def __exit__(self, *_: object) -> None:
        state = self._state
        state.in_flight -= 1
        state.used_at = time.time()
        if state.opening is not None and not state.in_flight:
            self._states.pop(state.session.session_id, None)


@dataclass(frozen=True, slots=True)
class SessionHints:
    """How a request names its session, apart from its key."""

    url: str | None = None
    header: str | None = None
    external: str | None = None
    """What the agent itself calls it."""
    previous: str | None = None
    """The session of the answer that it continues."""
    again: RetryEvidence | None = None
    """Whether the client has asked this already."""
    prompt: str | None = None
    """What it asks, where that is no messages."""


class Sessions:
    def __init__(
        self,
        store: Store,
        keys: Authenticator,
        hasher: MessageHasher,
        *,
        run_id: str,
        agent_id: str,
        policy_id: str,
        limit: int,
        redactor: Redactor,
    ) -> None:
        self.keys = keys
        self._redactor = redactor
        self._store = store
        self._hasher = hasher
        self._run_id = run_id
        self._agent_id = agent_id
        self._policy_id = policy_id
        self._limit = limit
        self._states: OrderedDict[str, SessionState] = OrderedDict()
        self._external: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._known = SessionIndex(hasher, 16 * limit)
        self._openings: OrderedDict[tuple[str, bytes, str | None], str] = OrderedDict()

    def __len__(self) -> int:
        """Sessions at hand."""
        return len(self._states)

    # --- which session ----------------------------------------------------------------------------

    async def resolve(
        self, caller: Caller, named: SessionHints, chain: HashChain | None, messages: Sequence[Message]
    ) -> SessionState:
        """The session of a model call: by URL, key or header, by the answer it continues, by the agent's own
        id for it, else by what is said; a fresh one when it is none of those."""
        agent_id = caller.agent_id or self._agent_id
        chosen = self._chosen(caller, named)
        if chosen is not None:
            if named.previous is not None and named.previous != chosen:
                raise _conflict("The answer that this request continues is of another session.")
            return await self.usable(chosen, caller)
        if named.previous is not None:
            return await self.usable(named.previous, caller)
        if named.external is not None:
            return await self._by_external(agent_id, self._kept_name(named.external))
        state = await self._opened_by(agent_id, chain, named.again) if chain else None
        state = state or await self._by_graph(agent_id, chain, messages, named.prompt)
        state.unnamed = state.session.external_id is None
        if chain and state.opening is not None:
            self._remember_opening(agent_id, chain, named.again, state)
        return state

    def _chosen(self, caller: Caller, named: SessionHints) -> str | None:
        """All that name a session of ours must agree."""
        names = [name for name in (named.url, caller.session_id, named.header) if name]
        if len(set(names)) > 1:
            raise _conflict("The URL, the key and the header name different sessions.")
        return names[0] if names else None

    async def usable(self, session_id: str, caller: Caller) -> SessionState:
        state = await self.state(session_id)
        caller.check_access(state.session)
        if state.session.status is not SessionStatus.OPEN:
            raise ApiError(410, "This session has ended.", code="session_ended")
        return state

    def _kept_name(self, external_id: str) -> str:
        """A name that holds a secret is kept as its hash: those of two sessions stay different."""
        if self._redactor.redact_text(external_id) == external_id:
            return external_id
        kind, _, value = external_id.partition(":")
        return f"{kind}:redacted-{self._hasher.hash_text(value).hex()}"

    async def _by_external(self, agent_id: str, external_id: str) -> SessionState:
        key = (agent_id, external_id)
        session_id = self._external.get(key)
        if session_id is None:
            session = await self._store.session_by_external_id(self._run_id, agent_id, external_id)
            # Another request may have opened it meanwhile.
            session_id = self._external.get(key) or (session.session_id if session else None)
        state = await self._open_state(session_id) if session_id else None
        while state is None and self._external.get(key, session_id) != session_id:
            session_id = self._external[key]
            state = await self._open_state(session_id)
        state = state or self._fresh(agent_id, external_id)
        remember(self._external, key, state.session.session_id, 16 * self._limit)
        return state

    def _remember_opening(
        self, agent_id: str, chain: HashChain, again: RetryEvidence | None, state: SessionState
    ) -> None:
        for client_key in {again.client_key if again else None, None}:
            where = (agent_id, chain.key, client_key)
            remember(self._openings, where, state.session.session_id, 4 * self._limit)

    async def _opened_by(
        self, agent_id: str, chain: HashChain, again: RetryEvidence | None
    ) -> SessionState | None:
        """The session that began with this very request, where its client asks again for the answer."""
        where = (agent_id, chain.key, again.client_key if again else None)
        state = await self._open_state(self._openings.get(where, ""))
        if state is None or again:
            return state
        waits = state.graph is not None and state.graph.is_undelivered(chain.key)
        gone = any(pending.client_gone for pending in state.pending.get(chain.key, ()))
        return state if waits or gone else None

    async def _by_graph(
        self, agent_id: str, chain: HashChain | None, messages: Sequence[Message], prompt: str | None
    ) -> SessionState:
        """The live session with a call whose messages (or prompt) and reply these begin with; or which made a
        tool call that these tell of: an agent that hands over to another changes instructions and tools."""
        tails = list(reversed(chain.canonical[2:-1])) if chain is not None else []
        known = [self._known.by_tails(agent_id, tails)]
        if prompt is not None:
            known.append(self._known.by_text(agent_id, prompt))
        for session_id in chain_iterables(*known):
            if state := await self._open_state(session_id):
                return state
        if tails:
            session_id = await self._store.session_by_tail(self._run_id, agent_id, tails[:_TAILS])
            if session_id is not None and (state := await self._open_state(session_id)):
                return state
        rewritten = self._known.by_asked(agent_id, chain, messages) if chain is not None else ()
        for session_id in chain_iterables(self._known.by_tool_calls(agent_id, messages), rewritten):
            if state := await self._open_state(session_id):
                return state
        return self._fresh(agent_id, None)

    async def _open_state(self, session_id: str) -> SessionState | None:
        """None where it has ended, or never came to be: its first call failed."""
        state = await self._found(session_id) if session_id else None
        return state if state and state.session.status is SessionStatus.OPEN else None

    def _fresh(self, agent_id: str, external_id: str | None) -> SessionState:
        session = Session(
            session_id=new_id("sess"),
            run_id=self._run_id,
            agent_id=agent_id,
            policy_id=self._policy_id,
            channel=Channel.LIVE,
            external_id=external_id,
            created_at=time.time(),
        )
        state = SessionState(session, opening=session, graph=MessageGraph(self._hasher))
        self._states[session.session_id] = state
        self._evict()
        return state

    def remember(self, state: SessionState, call: Call, whole: HashChain | None) -> None:
        """A recorded call. ``whole``: the chain of its messages and reply."""
        agent_id, session_id = state.session.agent_id, state.session.session_id
        if whole is not None and state.unnamed:
            self._known.add_tail(agent_id, whole.canonical[-1], session_id)
            self._known.add_asked(agent_id, whole.canonical[-2], call.reply, session_id)
        if state.session.channel is Channel.LIVE:
            self._known.add_tool_calls(agent_id, call.reply, session_id)

    def remember_text(self, state: SessionState, text: str) -> None:
        """A prompt without messages and its reply, of a session that has no other name."""
        self._known.add_text(state.session.agent_id, text, state.session.session_id)

    async def answer(self, caller: Caller, request_id: str) -> list[Call]:
        """The calls behind an earlier answer of this caller's."""
        calls = await self._store.calls_by_request(request_id)
        if calls:
            try:
                caller.check_access((await self.state(calls[0].session_id)).session)
                return calls
            except ApiError:
                pass  # another's: as if it were not there
        raise ApiError(
            404,
            f"There is no earlier answer {request_id!r}.",
            code="previous_response_not_found",
            param="previous_response_id",
        )

    async def state(self, session_id: str) -> SessionState:
        if (state := await self._found(session_id)) is None:
            raise ApiError(404, f"There is no session {session_id!r}.", code="session_not_found")
        return state

    async def _found(self, session_id: str) -> SessionState | None:
        if (state := self._states.get(session_id)) is None:
            session = await self._store.session(session_id)
            if session is None or session.run_id != self._run_id:
                return None
            state = self._states.setdefault(session_id, SessionState(session))
            self._evict()
        self._states.move_to_end(session_id)
        return state

    def answering(self, state: SessionState) -> Answering:
        """While a call of the session is answered. A session whose first call failed is forgotten."""
        return Answering(self._states, state)

    async def graph_of(self, state: SessionState) -> MessageGraph:
        if state.graph is None:
            async with state.loading:
                if state.graph is None:
                    rows = await self._store.call_deltas(state.session.session_id)
                    state.graph = MessageGraph(self._hasher, rows)
        return state.graph

    def _evict(self) -> None:
        if len(self._states) <= self._limit:
            return
        # Not the newest: its request is about to use it. One that is not stored yet cannot be read back.
        newest = next(reversed(self._states))
        for session_id, state in list(islice(self._states.items(), _EVICTED)):
            if session_id != newest and not state.in_flight and state.opening is None:
                del self._states[session_id]
                if len(self._states) <= self._limit:
                    return

    async def close_silent(self, seconds: float) -> int:
        """End live sessions without a call for so long."""
        closed = 0
        for session_id in await self._store.idle_sessions(self._run_id, time.time() - seconds):
            state = await self._open_state(session_id)
            if state is None or state.in_flight or state.used_at > time.time() - seconds:
                continue
            reason = f"silent for {seconds:g} s"
            # At once: a call that comes while it is being closed opens another.
            state.session = replace(state.session, status=SessionStatus.COMPLETED, reason=reason)
            if await self._store.end_session(session_id, SessionStatus.COMPLETED, reason):
                closed += 1
            self._states.pop(session_id, None)
        return closed

    # --- open, end, read --------------------------------------------------------------------------

    async def open(self, caller: Caller, asked: OpenSession) -> tuple[Session, str]:
        if caller.kind == "session":
            raise ApiError(403, "A session's key opens no other session.", code="not_allowed")
        if caller.kind == "agent" and asked.channel is not Channel.LIVE:
            raise ApiError(403, "Only the admin key opens sessions of this channel.", param="channel")
        check_sampling(asked.sampling)
        key = new_key()
        session = Session(
            session_id=new_id("sess"),
            run_id=self._run_id,
            agent_id=caller.agent_id or self._agent_id,
            policy_id=self._policy_id,
            channel=asked.channel,
            group_id=asked.group_id,
            slot=asked.slot,
            attempt=asked.attempt,
            task_id=asked.task_id,
            seed=asked.seed,
            sampling=asked.sampling,
            metadata=self._redactor.redact_value(
                asked.metadata if asked.task is None else {**asked.metadata, "task": asked.task}
            ),
            created_at=time.time(),
        )
        try:
            await self._store.open_session(session, hash_key(key))
        except ConflictError as error:
            raise ApiError(409, str(error), code="conflict") from error
        self._states[session.session_id] = SessionState(session)
        self._evict()
        return session, key

    async def end(
        self, session_id: str, caller: Caller, asked: CompleteSession | FailSession
    ) -> EndedSession:
        state = await self.state(session_id)
        caller.check_access(state.session)
        said = asked.scores if isinstance(asked, CompleteSession) else []
        for name in ("rewards", "scores"):
            if getattr(asked, name, None) and caller.kind != "admin":
                raise ApiError(403, f"Only the admin key gives '{name}'.", code="not_allowed", param=name)
        given = list(asked.rewards)
        if asked.reward is not None:
            given.insert(0, RewardBody(value=asked.reward, source=RewardSource.AGENT))
        for i, reward in enumerate(given):
            if not math.isfinite(reward.value):
                raise bad_request("A reward must be a finite number.", f"rewards[{i}].value", "invalid_value")
        failed = isinstance(asked, FailSession)
        status = SessionStatus.FAILED if failed else SessionStatus.COMPLETED
        clean = self._redactor
        reason = clean.redact_text(asked.reason) if isinstance(asked, FailSession) else None
        rewards = [reward_row(session_id, reward, clean.redact_value(reward.detail)) for reward in given]
        scores = [
            score_row(session_id, score, None if score.reason is None else clean.redact_text(score.reason))
            for score in said
        ]
        changed = await self._store.end_session(
            session_id, status, reason, rewards, clean.redact_value(asked.metadata), scores
        )
        if changed:
            state.session = replace(state.session, status=status, reason=reason, ended_at=time.time())
            if not state.in_flight:
                self._states.pop(session_id, None)
        else:
            session = await self._store.session(session_id)
            status = session.status if session else status
        return EndedSession(session_id=session_id, status=status, changed=changed)

    async def view(self, session_id: str, caller: Caller) -> SessionView:
        caller.check_access((await self.state(session_id)).session)
        session = await self._store.session(session_id)
        assert session is not None, "sessions are never deleted"
        return session_view(
            session, await self._store.calls(session_id), await self._store.rewards(session_id)
        )


def _conflict(message: str) -> ApiError:
    return ApiError(403, message, code="session_conflict")
