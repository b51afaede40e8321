"""Resolve the session that a model call belongs to."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain as chain_iterables
from typing import TypeVar

from instar.gateway.auth import Caller
from instar.gateway.base import ApiError
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.pipeline.parse import RetryEvidence
from instar.gateway.session_states import SessionState, SessionStates
from instar.record.hashing import HashChain, MessageHasher, normalize_call_id
from instar.types import Call, Channel, Message

_CALL_ID = re.compile(r"\bcall-?[0-9a-f]{20}\b")
"""The format of the tool call ids that `new_id` makes."""
_MAX_SEARCHED_CHARS = 4096
"""The number of characters of a message that are searched for tool call ids."""
_MAX_TEXT_LENGTHS = 64
"""The number of different text lengths per agent at which a longer prompt is compared with recorded texts."""
_MAX_TAILS = 64
"""The number of prefixes of the messages, longest first, that are looked up in the store."""


K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class SessionHints:
    """Everything in a request, apart from its key, that may identify its session."""

    url: str | None = None
    header: str | None = None
    external_id: str | None = None
    """The agent's own id for the session."""
    previous: str | None = None
    """The session of the response that the request continues."""
    retry: RetryEvidence | None = None
    prompt: str | None = None
    """The text prompt of a request without messages."""


class SessionResolver:
    def __init__(self, context: GatewayContext, states: SessionStates) -> None:
        self._store = context.store
        self._identity = context.identity
        self._hasher = context.hasher
        self._redactor = context.redactor
        self._states = states
        limit = context.config.max_sessions_in_memory
        self._max_entries = 16 * limit
        self._max_openings = 4 * limit
        self._external_ids: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._openings: OrderedDict[tuple[str, bytes, str | None], str] = OrderedDict()
        self._index = SessionIndex(context.hasher, self._max_entries)

    async def resolve(
        self, caller: Caller, hints: SessionHints, chain: HashChain | None, messages: Sequence[Message]
    ) -> SessionState:
        """Return the session of a request. The first match wins: the session named by the URL, key or header;
        the session of the response that the request continues; the session with the agent's own id; a session
        with matching content; or a new session."""
        agent_id = caller.agent_id or self._identity.agent_id
        session_id = _explicit_session_id(caller, hints)
        if session_id is not None:
            if hints.previous is not None and hints.previous != session_id:
                raise _conflict("The response that this request continues belongs to another session.")
            return await self._states.get_open(session_id, caller)
        if hints.previous is not None:
            return await self._states.get_open(hints.previous, caller)
        if hints.external_id is not None:
            return await self._find_by_external_id(agent_id, self._redact_external_id(hints.external_id))
        state = await self._find_by_opening(agent_id, chain, hints.retry) if chain else None
        state = state or await self._find_by_content(agent_id, chain, messages, hints.prompt)
        state = state or self._states.create(agent_id, None)
        state.is_matched_by_content = state.session.external_id is None
        if chain and state.unsaved_session is not None:
            client_key = hints.retry.client_key if hints.retry else None
            for key in {client_key, None}:
                session_id = state.session.session_id
                put_bounded(self._openings, (agent_id, chain.key, key), session_id, self._max_openings)
        return state

    async def expand_previous(
        self, caller: Caller, request: ModelRequest, chain: HashChain, *, allow_unknown: bool
    ) -> tuple[ModelRequest, HashChain, str | None]:
        """Return the request with the messages of the response that it continues put before its own messages,
        the hash chain of all messages, and the id of that response's session.

        With ``allow_unknown``, a request that continues a response not recorded here is returned unchanged,
        because the provider may know the response.
        """
        if request.previous_response_id is None:
            return request, chain, None
        try:
            call = (await self._find_response(caller, request.previous_response_id))[0]
        except ApiError:
            if allow_unknown:
                return request, chain, None
            raise
        count = request.instruction_count
        earlier = call.messages
        if earlier and earlier[0]["role"] == "system" and call.dialect == "responses":
            earlier = earlier[1:]
        messages = (*request.messages[:count], *earlier, call.reply, *request.messages[count:])
        request = replace(request, messages=messages)
        return request, self._hasher.hash_messages(messages, request.tools), call.session_id

    async def _find_response(self, caller: Caller, request_id: str) -> list[Call]:
        calls = await self._store.calls_by_request(request_id)
        if calls:
            try:
                caller.check_access((await self._states.get(calls[0].session_id)).session)
                return calls
            except ApiError:
                pass  # A response of another caller is reported like one that does not exist.
        raise ApiError(
            404,
            f"There is no earlier response {request_id!r}.",
            code="previous_response_not_found",
            param="previous_response_id",
        )

    def index_call(
        self, state: SessionState, call: Call, chain: HashChain | None, prompt: str | None
    ) -> None:
        """Make the session findable by a recorded call. ``chain`` includes the reply."""
        agent_id, session_id = state.session.agent_id, state.session.session_id
        if chain is not None and state.is_matched_by_content:
            self._index.add_tail(agent_id, chain.canonical[-1], session_id)
            self._index.add_reply(agent_id, chain.canonical[-2], call.reply, session_id)
        if state.session.channel is Channel.LIVE:
            self._index.add_tool_calls(agent_id, call.reply, session_id)
        if prompt is not None and state.is_matched_by_content:
            self._index.add_text(agent_id, prompt + call.reply["content"], session_id)

    def _redact_external_id(self, external_id: str) -> str:
        """Return the agent's id, or a hash of it if it contains a secret. The hash keeps the ids of two
        sessions different."""
        if self._redactor.redact_text(external_id) == external_id:
            return external_id
        kind, _, value = external_id.partition(":")
        return f"{kind}:redacted-{self._hasher.hash_text(value).hex()}"

    async def _find_by_external_id(self, agent_id: str, external_id: str) -> SessionState:
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

    async def _find_by_opening(
        self, agent_id: str, chain: HashChain, retry: RetryEvidence | None
    ) -> SessionState | None:
        """Return the session that began with exactly this request, if the client is retrying the request."""
        key = (agent_id, chain.key, retry.client_key if retry else None)
        state = await self._states.find_open(self._openings.get(key, ""))
        if state is None or retry:
            return state
        is_undelivered = state.graph is not None and state.graph.is_undelivered(chain.key)
        client_gone = any(pending.client_gone for pending in state.pending.get(chain.key, ()))
        return state if is_undelivered or client_gone else None

    async def _find_by_content(
        self, agent_id: str, chain: HashChain | None, messages: Sequence[Message], prompt: str | None
    ) -> SessionState | None:
        """Return a live session that this request continues, or None.

        A session matches if the request starts with the messages (or the prompt) and the reply of one of its
        calls, or if the messages mention one of its tool calls. The second rule finds agents that hand over
        to another agent, which has different instructions and tools.
        """
        tails = list(reversed(chain.canonical[2:-1])) if chain is not None else []
        candidates = [self._index.find_by_tails(agent_id, tails)]
        if prompt is not None:
            candidates.append(self._index.find_by_text(agent_id, prompt))
        for session_id in chain_iterables(*candidates):
            if state := await self._states.find_open(session_id):
                return state
        if tails:
            run_id = self._identity.run_id
            session_id = await self._store.session_by_tail(run_id, agent_id, tails[:_MAX_TAILS])
            if session_id is not None and (state := await self._states.find_open(session_id)):
                return state
        by_tool_call = self._index.find_by_tool_calls(agent_id, messages)
        by_reply = self._index.find_by_replies(agent_id, chain, messages) if chain is not None else ()
        for session_id in chain_iterables(by_tool_call, by_reply):
            if state := await self._states.find_open(session_id):
                return state
        return None


def _explicit_session_id(caller: Caller, hints: SessionHints) -> str | None:
    ids = [session_id for session_id in (hints.url, caller.session_id, hints.header) if session_id]
    if len(set(ids)) > 1:
        raise _conflict("The URL, the key and the header name different sessions.")
    return ids[0] if ids else None


def _conflict(message: str) -> ApiError:
    return ApiError(403, message, code="session_conflict")


class SessionIndex:
    """Finds live sessions by the content of their calls. All tables have a size limit, and agents are kept
    apart."""

    def __init__(self, hasher: MessageHasher, limit: int) -> None:
        """``limit`` is the maximum number of entries of each table."""
        self._hasher = hasher
        self._limit = limit
        self._tails: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._tool_calls: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._replies: OrderedDict[tuple[str, bytes], tuple[str, int, bytes]] = OrderedDict()
        self._texts: OrderedDict[tuple[str, int, bytes], str] = OrderedDict()
        self._text_lengths: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()

    def add_tail(self, agent_id: str, key: bytes, session_id: str) -> None:
        """Add a recorded call by the hash of its messages and reply."""
        put_bounded(self._tails, (agent_id, key), session_id, self._limit)

    def find_by_tails(self, agent_id: str, keys: Sequence[bytes]) -> Iterator[str]:
        return (session_id for key in keys if (session_id := self._tails.get((agent_id, key))))

    def add_tool_calls(self, agent_id: str, reply: Message, session_id: str) -> None:
        for call in reply.get("tool_calls", ()):
            put_bounded(self._tool_calls, (agent_id, normalize_call_id(call["id"])), session_id, self._limit)

    def find_by_tool_calls(self, agent_id: str, messages: Sequence[Message]) -> Iterator[str]:
        """Yield the sessions that made a tool call mentioned in the messages, the latest call first."""
        for call_id in _mentioned_call_ids(messages):
            if session_id := self._tool_calls.get((agent_id, call_id)):
                yield session_id

    def add_reply(self, agent_id: str, key: bytes, reply: Message, session_id: str) -> None:
        """Add a reply by the hash of the messages that precede it."""
        if text := reply["content"].strip():
            entry = (session_id, len(text), self._hasher.hash_text(text))
            put_bounded(self._replies, (agent_id, key), entry, self._limit)

    def find_by_replies(self, agent_id: str, chain: HashChain, messages: Sequence[Message]) -> Iterator[str]:
        """Yield the sessions in which, after the same messages, a reply is the beginning of one of these
        messages: some agents append to a reply before they send it back."""
        for count in range(len(messages) - 1, 0, -1):
            entry = self._replies.get((agent_id, chain.canonical[count]))
            if entry is None or messages[count]["role"] != "assistant":
                continue
            session_id, length, digest = entry
            text = messages[count]["content"].strip()
            if len(text) >= length and self._hasher.hash_text(text[:length]) == digest:
                yield session_id

    def add_text(self, agent_id: str, text: str, session_id: str) -> None:
        """Add a text prompt together with its reply."""
        put_bounded(self._texts, (agent_id, len(text), self._hasher.hash_text(text)), session_id, self._limit)
        lengths = self._text_lengths.setdefault(agent_id, OrderedDict())
        put_bounded(self._text_lengths, agent_id, lengths, self._limit)
        put_bounded(lengths, len(text), None, _MAX_TEXT_LENGTHS)

    def find_by_text(self, agent_id: str, prompt: str) -> Iterator[str]:
        """Yield the sessions with a prompt and reply that ``prompt`` starts with, the longest first."""
        for length in sorted(self._text_lengths.get(agent_id, ()), reverse=True):
            if length <= len(prompt):
                key = (agent_id, length, self._hasher.hash_text(prompt[:length]))
                if session_id := self._texts.get(key):
                    yield session_id


def put_bounded(table: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Put an entry at the end of the table, and drop the oldest entries beyond ``limit``."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)


def _mentioned_call_ids(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the ids of tool calls that the messages mention, the latest first. Some agents write the ids into
    the text."""
    for message in reversed(messages):
        for call in message.get("tool_calls", ()):
            yield normalize_call_id(call["id"])
        if message["role"] != "system":
            yield from map(normalize_call_id, _CALL_ID.findall(message["content"][:_MAX_SEARCHED_CHARS]))
