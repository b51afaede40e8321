"""Resolve the session that a model call belongs to."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from instar.gateway.auth import Action, Caller
from instar.gateway.base import ApiError, bad_request
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.gateway.pipeline.parse import RetryHeaders
from instar.gateway.session_states import SessionState, SessionStates
from instar.gateway.stored_responses import StoredResponses
from instar.record.hashing import (
    HashChain,
    MessageHasher,
    latest_tool_call_ids,
    normalize_call_id,
    tool_call_ids,
)
from instar.types import Call, Channel, Message

_TOOL_CALL_ID = re.compile(r"\bcall-?[0-9a-f]{20}\b")
"""The format of tool call ids from `new_id`, with or without the hyphen."""
_MAX_SEARCHED_CHARACTERS = 4096
"""Only this many characters at the start of a message are searched for tool call ids."""
_MAX_TEXT_LENGTHS = 64
"""A prompt is compared with an agent's recorded texts of at most this many different lengths."""
_MAX_STORE_LOOKUPS = 64
"""At most this many message prefixes are looked up in the store, longest first."""
_MAX_SESSIONS_PER_KEY = 8
"""A request is compared with at most this many of the newest sessions with equal content."""

K = TypeVar("K")
V = TypeVar("V")
SessionTable: TypeAlias = OrderedDict[K, tuple[str, ...]]
"""Maps a content key to the ids of the newest sessions with this content, newest last."""


@dataclass(frozen=True, slots=True)
class SessionHints:
    """The values in a request, other than its key and messages, that may identify its session."""

    url_session_id: str | None = None
    header_session_id: str | None = None
    external_id: str | None = None
    """The agent's own id for the session."""
    previous_session_id: str | None = None
    """The session of the request's `previous_response_id`."""
    referenced_session_id: str | None = None
    """The session of the earlier responses whose items the request refers to."""
    retry: RetryHeaders | None = None
    prompt: str | None = None
    """The text prompt of a request without messages."""


class SessionResolver:
    def __init__(self, context: GatewayContext, states: SessionStates) -> None:
        self._store = context.store
        self._identity = context.identity
        self._hasher = context.hasher
        self._redactor = context.redactor
        self._states = states
        self._responses = StoredResponses(context, states)
        limit = context.config.max_sessions_in_memory
        self._max_entries = 16 * limit
        self._max_first_requests = 4 * limit
        self._external_ids: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._first_requests: OrderedDict[tuple[str, bytes, str | None], str] = OrderedDict()
        self.index = SessionIndex(context.hasher, self._max_entries)

    async def resolve(
        self, caller: Caller, hints: SessionHints, chain: HashChain | None, messages: Sequence[Message]
    ) -> SessionState:
        """Return the session of a request, or create one.

        The URL, key, header or previous response may name the session. Otherwise an open session is looked up
        by the agent's own id, if the request has one, or else by the items that it refers to or by content.
        Raise ApiError if the named session is unknown (404), forbidden or ambiguous (403), or has ended
        (410).
        """
        agent_id = caller.agent_id or self._identity.default_agent_id
        named_ids = (hints.url_session_id, hints.header_session_id, hints.previous_session_id)
        session_ids = {session_id for session_id in (caller.session_id, *named_ids) if session_id}
        if len(session_ids) > 1:
            message = "The URL, key, header and previous response name different sessions; name only one."
            raise ApiError(403, message, code="session_conflict")
        if session_ids:
            return await self._states.get_open(session_ids.pop(), caller, Action.CALL_MODEL)
        if hints.external_id is not None:
            return await self._get_or_create_by_external_id(agent_id, hints.external_id)
        if (state := await self._states.find_open(hints.referenced_session_id or "")) is not None:
            return state
        state = await self._find_by_first_request(agent_id, chain, hints.retry) if chain else None
        state = state or await self._find_by_content(agent_id, chain, messages, hints.prompt)
        state = state or self._states.create(agent_id, None)
        state.is_matched_by_content = state.session.external_id is None
        if chain and state.unsaved_session is not None:
            client_key = hints.retry.client_key if hints.retry else None
            for key in {client_key, None}:
                session_id = state.session.session_id
                table_key = (agent_id, chain.key, key)
                put_bounded(self._first_requests, table_key, session_id, self._max_first_requests)
        return state

    async def expand_references(
        self, caller: Caller, dialect: Dialect, request: ModelRequest, *, allow_unknown: bool
    ) -> tuple[ModelRequest, str | None, str | None]:
        """Complete the messages of a request that refers to earlier responses. Insert the messages and reply
        of the previous response, if any, after the request's instructions.

        Return the request, the session id of the previous response, and the session id of the other responses
        if they belong to one session. If the previous response is not stored, raise ApiError (400) or, if
        ``allow_unknown`` is True, do not insert it, because the provider may know it.
        """
        previous_id, ids = request.previous_response_id, request.referenced_ids
        if previous_id is None and not ids:
            return request, None, None
        known_ids = ids if previous_id is None else (*ids, previous_id)
        replies, refused = await self._responses.find(caller, known_ids, Action.CALL_MODEL)
        session_ids = {replies[id].session_id for id in ids if id in replies}
        session_id = session_ids.pop() if len(session_ids) == 1 else None
        if ids:
            referenced = {id: replies[id].reply for id in ids if id in replies}
            request = dialect.resolve_references(request, referenced)
        is_unknown = previous_id not in replies and previous_id not in refused
        if previous_id is None or (is_unknown and allow_unknown):
            return request, None, session_id
        previous = replies.get(previous_id)
        call = await self._store.call(previous.call_id) if previous else None
        if previous is None or call is None:
            message = f"Previous response with id {previous_id!r} not found; send the complete conversation."
            param = "previous_response_id"
            raise bad_request(message, param, "previous_response_not_found")
        count, messages = request.instruction_count, call.messages
        if previous.response_fields is not None:
            messages = messages[previous.response_fields["instruction_count"] :]
        elif messages and messages[0]["role"] == "system" and call.dialect == "responses":
            messages = messages[1:]  # The call was recorded before the number of instructions was stored.
        messages = (*request.messages[:count], *messages, call.reply, *request.messages[count:])
        return replace(request, messages=messages), call.session_id, session_id

    async def _get_or_create_by_external_id(self, agent_id: str, external_id: str) -> SessionState:
        if self._redactor.redact_text(external_id) != external_id:
            # The id contains a secret. Replace it with a hash, so that different sessions keep different ids.
            prefix, _, value = external_id.partition(":")
            external_id = f"{prefix}:redacted-{self._hasher.hash_text(value).hex()}"
        key = (agent_id, external_id)
        session_id = self._external_ids.get(key)
        if session_id is None:
            run_id = self._identity.run_id
            session = await self._store.session_by_external_id(run_id, agent_id, external_id)
            # A concurrent request may have opened the session during the query.
            session_id = self._external_ids.get(key) or (session.session_id if session else None)
        state = await self._states.find_open(session_id) if session_id else None
        while state is None and self._external_ids.get(key, session_id) != session_id:
            session_id = self._external_ids[key]
            state = await self._states.find_open(session_id)
        state = state or self._states.create(agent_id, external_id)
        put_bounded(self._external_ids, key, state.session.session_id, self._max_entries)
        return state

    async def _find_by_first_request(
        self, agent_id: str, chain: HashChain, retry: RetryHeaders | None
    ) -> SessionState | None:
        """Return the open session whose first request this request retries, or None."""
        key = (agent_id, chain.key, retry.client_key if retry else None)
        state = await self._states.find_open(self._first_requests.get(key, ""))
        if state is None or retry:
            return state
        is_undelivered = state.graph is not None and chain.key in state.graph.undelivered
        is_disconnected = any(pending.client_disconnected for pending in state.pending.get(chain.key, ()))
        return state if is_undelivered or is_disconnected else None

    async def _find_by_content(
        self, agent_id: str, chain: HashChain | None, messages: Sequence[Message], prompt: str | None
    ) -> SessionState | None:
        """Return the live session that this request continues, or None.

        The evidence is, from strongest to weakest: only this session made the request's latest tool call; the
        request starts with the messages (or the prompt) and the reply of one of its calls; the messages
        mention one of its tool calls, for example after a handoff to an agent with different instructions;
        a message starts with one of its replies.
        """
        index, ids = self.index, latest_tool_call_ids(messages)
        states = await self._find_open([index.find_by_call_ids(agent_id, ids)]) if ids else []
        if len(states) == 1:
            return states[0]
        if chain is None:
            states = await self._find_open(index.find_by_text(agent_id, prompt)) if prompt is not None else []
            return await self._choose(states, chain, messages)
        tails = list(reversed(chain.canonical[2:-1]))
        states = await self._find_open(index.find_by_tails(agent_id, tails))
        if tails and (ids or not states):
            # Sessions from before a restart are only in the store. Without tool calls, the store is searched
            # only if the index has no match, which saves almost every call a query.
            run_id = self._identity.run_id
            stored = await self._store.sessions_by_tail(run_id, agent_id, tails[:_MAX_STORE_LOOKUPS])
            states = await self._find_open([stored]) or states
        if not states and prompt is not None:
            states = await self._find_open(index.find_by_text(agent_id, prompt))
        states = states or await self._find_open(index.find_by_tool_calls(agent_id, messages))
        states = states or await self._find_open(index.find_by_replies(agent_id, chain, messages))
        return await self._choose(states, chain, messages)

    async def _find_open(self, matches: Iterable[Sequence[str]]) -> list[SessionState]:
        """Return the open sessions of the first match that has any."""
        for session_ids in matches:
            states = [await self._states.find_open(session_id) for session_id in session_ids]
            if open_states := [state for state in states if state is not None]:
                return open_states
        return []

    async def _choose(
        self, states: Sequence[SessionState], chain: HashChain | None, messages: Sequence[Message]
    ) -> SessionState | None:
        """Return the session that matches the request best, or None if there is none or several match equally
        well, because a new session does less harm than mixing two conversations."""
        if len(states) < 2 or chain is None:
            return states[0] if len(states) == 1 else None
        graphs = [await self._states.load_graph(state) for state in states]
        strengths = [graph.match_strength(chain, messages) for graph in graphs]
        best = max(strengths)
        return states[strengths.index(best)] if strengths.count(best) == 1 else None


class SessionIndex:
    """Finds an agent's live sessions by the content of their calls."""

    def __init__(self, hasher: MessageHasher, limit: int) -> None:
        """Create an index with at most ``limit`` entries in each table."""
        self._hasher = hasher
        self._limit = limit
        # The keys of all tables start with the agent's id.
        self._tails: SessionTable[tuple[str, bytes]] = OrderedDict()
        """By the hash of a call's messages and reply."""
        self._tool_calls: SessionTable[tuple[str, str]] = OrderedDict()
        self._replies: SessionTable[tuple[str, bytes, int, bytes]] = OrderedDict()
        """By the hash of the messages before a reply, and the length and hash of the reply's text."""
        self._reply_lengths: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._texts: SessionTable[tuple[str, int, bytes]] = OrderedDict()
        """By the length and hash of a text prompt together with its reply."""
        self._text_lengths: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()

    def add_call(self, state: SessionState, call: Call, chain: HashChain | None, prompt: str | None) -> None:
        """Add a recorded call. ``chain`` includes its reply, and ``prompt`` is its text prompt, if any."""
        agent_id, session_id = state.session.agent_id, state.session.session_id
        text, canonical = call.reply["content"], () if chain is None else chain.canonical
        if canonical and state.is_matched_by_content:
            self._add(self._tails, (agent_id, canonical[-1]), session_id)
            if reply := text.strip():
                key = (agent_id, canonical[-2])
                put_bounded(self._reply_lengths, key, len(reply), self._limit)
                self._add(self._replies, (*key, len(reply), self._hasher.hash_text(reply)), session_id)
        if state.session.channel is Channel.LIVE:
            for call_id in map(normalize_call_id, tool_call_ids(call.reply)):
                self._add(self._tool_calls, (agent_id, call_id), session_id)
        if prompt is not None and state.is_matched_by_content:
            text = prompt + text
            self._add(self._texts, (agent_id, len(text), self._hasher.hash_text(text)), session_id)
            lengths = self._text_lengths.setdefault(agent_id, OrderedDict())
            put_bounded(self._text_lengths, agent_id, lengths, self._limit)
            put_bounded(lengths, len(text), None, _MAX_TEXT_LENGTHS)

    def find_by_tails(self, agent_id: str, keys: Sequence[bytes]) -> Iterator[tuple[str, ...]]:
        return (self._tails[agent_id, key] for key in keys if (agent_id, key) in self._tails)

    def find_by_call_ids(self, agent_id: str, ids: Iterable[str]) -> tuple[str, ...]:
        """Return the sessions that made the tool call with the first known id. If there are as many as the
        table keeps per id, return (), because some providers use the same call ids in every session."""
        matches = (self._tool_calls.get((agent_id, normalize_call_id(call_id))) for call_id in ids)
        session_ids = next(filter(None, matches), ())
        return session_ids if len(session_ids) < _MAX_SESSIONS_PER_KEY else ()

    def find_by_tool_calls(self, agent_id: str, messages: Sequence[Message]) -> Iterator[tuple[str, ...]]:
        """Yield the sessions whose tool call ids occur in the messages or their texts, last message first."""
        for message in reversed(messages):
            ids = [*tool_call_ids(message)]
            if message["role"] != "system":
                ids += _TOOL_CALL_ID.findall(message["content"][:_MAX_SEARCHED_CHARACTERS])
            for call_id in map(normalize_call_id, ids):
                if session_ids := self._tool_calls.get((agent_id, call_id)):
                    yield session_ids

    def find_by_replies(
        self, agent_id: str, chain: HashChain, messages: Sequence[Message]
    ) -> Iterator[tuple[str, ...]]:
        """Yield the sessions with a recorded reply to a prefix of the messages, if the next message starts
        with that reply. Some agents append text to a reply before they send it back."""
        for count in range(len(messages) - 1, 0, -1):
            key = chain.canonical[count]
            length = self._reply_lengths.get((agent_id, key))
            if length is None or messages[count]["role"] != "assistant":
                continue
            text = messages[count]["content"].strip()[:length]
            yield self._replies.get((agent_id, key, length, self._hasher.hash_text(text)), ())

    def find_by_text(self, agent_id: str, prompt: str) -> Iterator[tuple[str, ...]]:
        """Yield sessions whose recorded prompt and reply are a prefix of ``prompt``, longest first."""
        for length in sorted(self._text_lengths.get(agent_id, ()), reverse=True):
            if length <= len(prompt):
                key = (agent_id, length, self._hasher.hash_text(prompt[:length]))
                yield self._texts.get(key, ())

    def _add(self, table: SessionTable[K], key: K, session_id: str) -> None:
        others = (other for other in table.get(key, ()) if other != session_id)
        put_bounded(table, key, (*others, session_id)[-_MAX_SESSIONS_PER_KEY:], self._limit)


def put_bounded(table: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Put an entry at the end of the table, and remove the oldest entries beyond ``limit``."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
