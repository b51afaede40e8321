"""An index of live sessions by the content of their calls, for requests that name no session.

All tables are bounded, and each agent's sessions are found by that agent alone.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from instar.record.hashing import HashChain, MessageHasher
from instar.record.nodes import normalize_call_id
from instar.types import Message

_CALL_ID = re.compile(r"\bcall-?[0-9a-f]{20}\b")
"""The format of the tool call ids that `new_id` makes."""
_MAX_SEARCHED_CHARS = 4096
"""The number of characters of a message that are searched for tool call ids."""
_MAX_TEXT_LENGTHS = 64
"""The number of different text lengths per agent that a longer prompt is compared with."""

K = TypeVar("K")
V = TypeVar("V")


class SessionIndex:
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
        """Yield the sessions that made a tool call which the messages mention, the latest call first."""
        for call_id in _mentioned_call_ids(messages):
            if session_id := self._tool_calls.get((agent_id, call_id)):
                yield session_id

    def add_reply(self, agent_id: str, key: bytes, reply: Message, session_id: str) -> None:
        """Add a reply by the hash of the messages before it."""
        if text := reply["content"].strip():
            entry = (session_id, len(text), self._hasher.hash_text(text))
            put_bounded(self._replies, (agent_id, key), entry, self._limit)

    def find_by_replies(self, agent_id: str, chain: HashChain, messages: Sequence[Message]) -> Iterator[str]:
        """Yield the sessions whose reply one of the messages starts with, after the same messages: some
        agents append to a reply before they send it back."""
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
        """Yield the sessions with a prompt and reply that this prompt starts with, the longest first."""
        for length in sorted(self._text_lengths.get(agent_id, ()), reverse=True):
            if length <= len(prompt):
                key = (agent_id, length, self._hasher.hash_text(prompt[:length]))
                if session_id := self._texts.get(key):
                    yield session_id


def put_bounded(table: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Put an entry last, and drop the first entries beyond ``limit``."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)


def _mentioned_call_ids(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the ids of tool calls in the messages, the latest first. Some agents write them into the text."""
    for message in reversed(messages):
        for call in message.get("tool_calls", ()):
            yield normalize_call_id(call["id"])
        if message["role"] != "system":
            yield from map(normalize_call_id, _CALL_ID.findall(message["content"][:_MAX_SEARCHED_CHARS]))
