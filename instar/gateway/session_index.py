"""Which live session said something: looked up where a request names none. All tables are bounded, and keep
the sessions of one agent from those of another."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from instar.record.hashing import HashChain, MessageHasher
from instar.record.nodes import normalize_call_id
from instar.types import Message

_CALL_ID = re.compile(r"\bcall-?[0-9a-f]{20}\b")
"""An id of ours, as `new_id` makes them."""
_SEARCHED = 4096
"""Characters of a message that are looked through for one."""
_LENGTHS = 64
"""Lengths of prompts with their replies that a longer prompt is compared with, for each agent."""

K = TypeVar("K")
V = TypeVar("V")


class SessionIndex:
    def __init__(self, hasher: MessageHasher, limit: int) -> None:
        """``limit``: entries of each table."""
        self._hasher = hasher
        self._limit = limit
        self._tails: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._tool_calls: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._asked: OrderedDict[tuple[str, bytes], tuple[str, int, bytes]] = OrderedDict()
        self._texts: OrderedDict[tuple[str, int, bytes], str] = OrderedDict()
        self._lengths: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()

    def add_tail(self, agent_id: str, key: bytes, session_id: str) -> None:
        """``key`` stands for a recorded call's messages and reply."""
        remember(self._tails, (agent_id, key), session_id, self._limit)

    def by_tails(self, agent_id: str, keys: Sequence[bytes]) -> Iterator[str]:
        return (found for key in keys if (found := self._tails.get((agent_id, key))))

    def add_tool_calls(self, agent_id: str, reply: Message, session_id: str) -> None:
        for call in reply.get("tool_calls", ()):
            remember(self._tool_calls, (agent_id, normalize_call_id(call["id"])), session_id, self._limit)

    def by_tool_calls(self, agent_id: str, messages: Sequence[Message]) -> Iterator[str]:
        """Those which made a tool call that the messages tell of, the latest first."""
        for call_id in _told_calls(messages):
            if found := self._tool_calls.get((agent_id, call_id)):
                yield found

    def add_asked(self, agent_id: str, key: bytes, reply: Message, session_id: str) -> None:
        """``key`` stands for a recorded call's messages."""
        if text := reply["content"].strip():
            entry = (session_id, len(text), self._hasher.hash_text(text))
            remember(self._asked, (agent_id, key), entry, self._limit)

    def by_asked(self, agent_id: str, chain: HashChain, messages: Sequence[Message]) -> Iterator[str]:
        """Those with a call whose messages these begin with, and whose reply the next one begins with: some
        agents add to what was said."""
        for count in range(len(messages) - 1, 0, -1):
            entry = self._asked.get((agent_id, chain.canonical[count]))
            if entry is None or messages[count]["role"] != "assistant":
                continue
            session_id, length, digest = entry
            text = messages[count]["content"].strip()
            if len(text) >= length and self._hasher.hash_text(text[:length]) == digest:
                yield session_id

    def add_text(self, agent_id: str, text: str, session_id: str) -> None:
        """``text``: a prompt without messages, and its reply."""
        remember(self._texts, (agent_id, len(text), self._hasher.hash_text(text)), session_id, self._limit)
        lengths = self._lengths.setdefault(agent_id, OrderedDict())
        remember(self._lengths, agent_id, lengths, self._limit)
        remember(lengths, len(text), None, _LENGTHS)

    def by_text(self, agent_id: str, prompt: str) -> Iterator[str]:
        """Those with a prompt and reply that this one begins with, the longest first."""
        for length in sorted(self._lengths.get(agent_id, ()), reverse=True):
            if length <= len(prompt):
                key = (agent_id, length, self._hasher.hash_text(prompt[:length]))
                if found := self._texts.get(key):
                    yield found


def remember(table: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)


def _told_calls(messages: Sequence[Message]) -> Iterator[str]:
    """Ids of tool calls that the messages tell of, the latest first. Some agents write them into the text."""
    for message in reversed(messages):
        for call in message.get("tool_calls", ()):
            yield normalize_call_id(call["id"])
        if message["role"] != "system":
            yield from map(normalize_call_id, _CALL_ID.findall(message["content"][:_SEARCHED]))
