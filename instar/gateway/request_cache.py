"""A cache of parsed requests.

Agents send their complete history with every call. If a body starts with the same bytes as an earlier body of
the session or agent, the messages in those bytes and their hashes are reused, and only the rest is parsed.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.record.hashing import HashChain, MessageHasher

MIN_CACHED_BODY = 8 * 1024
"""The minimum size, in bytes, of a cached body. Parsing a smaller body is faster than using the cache."""
_MAX_BODIES_PER_KEY = 4
_MAX_UNUSED_SECONDS = 20.0
"""How long unused bodies are kept. Otherwise, rare large bodies would slowly fill the cache; to parse a body
again after this time costs little."""
_PARSED_MESSAGE_BYTES = 450
"""The memory, in bytes, of a parsed message and its hash, in addition to its text."""
_PARSED_FIELD_FACTOR = 5
"""The memory of the tools, divided by the size of their JSON. Other fields take less."""
_WHITESPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class _ParsedBody:
    body: bytes
    ends: list[int]
    """The end offset of each message."""
    start: int
    """The offset of the first message."""
    request: ModelRequest
    chain: HashChain
    parsed_at: float

    @property
    def size(self) -> int:
        """The approximate memory in bytes. The texts are in the body and in the parsed messages."""
        other_bytes = len(self.body) - (self.ends[-1] - self.start)
        fields = _PARSED_MESSAGE_BYTES * len(self.ends) + _PARSED_FIELD_FACTOR * other_bytes
        return 2 * len(self.body) + fields


class _MessagesBody(msgspec.Struct):
    messages: list[msgspec.Raw]


class RequestCache:
    def __init__(
        self,
        hasher: MessageHasher,
        max_bytes: int,
        check_body: Callable[[bytes], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a cache. ``max_bytes`` limits the memory of the cached bodies and their messages.
        ``check_body`` raises ApiError if a body, or the uncached rest of one, must not be parsed."""
        self._hasher = hasher
        self._max_bytes = max_bytes
        self._check_body = check_body
        self._clock = clock
        self._entries: OrderedDict[Hashable, list[_ParsedBody]] = OrderedDict()
        self.size = 0  # in bytes

    def clear(self) -> None:
        self._entries.clear()
        self.size = 0

    def parse(
        self,
        dialect: Dialect,
        cache_key: Hashable,
        body: bytes,
        check: Callable[[ModelRequest], None] = lambda _: None,
    ) -> tuple[ModelRequest, HashChain]:
        """Return the request and its hash chain. If ``check`` raises an error, the request is not cached."""
        key = (dialect.name, cache_key)
        cached, count = self._find_longest_prefix(key, body)
        parsed = self._parse_rest(dialect, body, cached, count) if cached else None
        if parsed is not None:
            check(parsed.request)
            self._put(key, parsed, cached)
            return parsed.request, parsed.chain
        self._check_body(body)
        request = dialect.parse_request(body)
        check(request)
        chain = self._hasher.hash_messages(request.messages, request.tools)
        offsets = _find_message_offsets(body) if request.unsupported_error is None else None
        if offsets is not None:
            start, ends = offsets
            self._put(key, _ParsedBody(body, ends, start, request, chain, self._clock()), None)
        return request, chain

    def _parse_rest(
        self, dialect: Dialect, body: bytes, cached: _ParsedBody, count: int
    ) -> _ParsedBody | None:
        """Take the first ``count`` messages from ``cached`` and parse only the rest. Return None if the
        complete body must be parsed, for example so that an error has the right position."""
        start = cached.start
        rest_start = _find_next_message(body, cached.ends[count - 1])
        rest = body[:start] + body[rest_start:]
        try:
            self._check_body(rest)
            parsed = dialect.parse_request(rest)
        except ApiError:
            return None
        offsets = _find_message_offsets(rest) if parsed.unsupported_error is None else None
        # If "messages" occurs twice, the decoder keeps the last list, and the offsets may be wrong.
        if offsets is None or rest[start : offsets[0]].strip() or offsets[0] < start:
            return None
        request = replace(parsed, messages=cached.request.messages[:count] + parsed.messages)
        if request.tools == cached.request.tools:
            tools_digest = cached.chain.tools_digest
        else:
            tools_digest = self._hasher.hash_tools(request.tools)
        prefix = cached.chain.prefix(count).with_tools(tools_digest)
        chain = prefix.extend(map(self._hasher.hash_message, parsed.messages))
        ends = cached.ends[:count] + [end + rest_start - start for end in offsets[1]]
        return _ParsedBody(body, ends, start, request, chain, self._clock())

    def _find_longest_prefix(self, key: Hashable, body: bytes) -> tuple[_ParsedBody | None, int]:
        """Return the cached body that shares the most leading messages with ``body``, and how many it shares,
        or None and 0. The last message of ``body`` never counts, so that the rest is never empty."""
        best: _ParsedBody | None = None
        best_count = 0
        for cached in self._entries.get(key, ()):
            count = bisect_right(cached.ends, _common_prefix_length(cached.body, body))
            while count and _find_next_message(body, cached.ends[count - 1]) == 0:
                count -= 1
            if count > best_count:
                best, best_count = cached, count
        return best, best_count

    def _put(self, key: Hashable, parsed: _ParsedBody, cached: _ParsedBody | None) -> None:
        entries = self._entries.setdefault(key, [])
        self._entries.move_to_end(key)
        if cached is not None and len(cached.ends) <= len(parsed.ends):
            entries.remove(cached)
            self.size -= cached.size
        entries.append(parsed)
        self.size += parsed.size
        if len(entries) > _MAX_BODIES_PER_KEY:
            self.size -= entries.pop(0).size
        while self.size > self._max_bytes or self._is_oldest_unused(parsed.parsed_at):
            _, dropped = self._entries.popitem(last=False)
            self.size -= sum(entry.size for entry in dropped)

    def _is_oldest_unused(self, now: float) -> bool:
        """Return whether the entries of the key that was used longest ago are too old."""
        oldest = next(iter(self._entries.values()), None)
        return oldest is not None and oldest[-1].parsed_at < now - _MAX_UNUSED_SECONDS


def _common_prefix_length(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    if a[:256] != b[:256]:  # Most unrelated bodies differ near the start.
        length = min(length, 256)
    different = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    position = int(different.argmax())
    return position if different[position] else length


def _find_next_message(body: bytes, end: int) -> int:
    """Return the offset after the comma that follows the message ending at ``end``, or 0 if none follows."""
    while body[end : end + 1] and body[end] in _WHITESPACE:
        end += 1
    return end + 1 if body[end : end + 1] == b"," else 0


def _find_message_offsets(body: bytes) -> tuple[int, list[int]] | None:
    """Return the offset of the first message and the end offset of each message, or None if the body has no
    messages. A msgspec.Raw is a view of the body, so the offsets are computed from addresses."""
    try:
        raws = msgspec.json.decode(body, type=_MessagesBody).messages
    except msgspec.DecodeError:
        return None
    origin = _get_address(body)
    starts = [_get_address(raw) - origin for raw in raws]
    if not starts or not 0 <= starts[0] < len(body):
        return None
    return starts[0], [start + len(memoryview(raw)) for start, raw in zip(starts, raws, strict=True)]


def _get_address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data
