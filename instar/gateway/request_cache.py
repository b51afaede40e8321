"""What was parsed already is not parsed again.

An agent sends its whole history with every call. Where a body begins with the same bytes as an earlier one
of the same caller, the messages within those bytes are taken from there, hashes included, and only the
rest is read: the cost of a call goes with what is new in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.record.hashing import HashChain, MessageHasher

_WORTHWHILE = 8 * 1024
"""Smaller bodies are read faster than they are looked up."""
_CANDIDATES = 4
"""Bodies kept for each caller."""
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class _Read:
    body: bytes
    ends: list[int]
    """Where each message ends in the body."""
    begin: int
    """Where the first message begins."""
    request: ModelRequest
    chain: HashChain


class _Messages(msgspec.Struct):
    messages: list[msgspec.Raw]


class RequestCache:
    def __init__(self, hasher: MessageHasher, budget: int = 32 * 1024 * 1024) -> None:
        """``budget``: bytes of bodies kept."""
        self._hasher = hasher
        self._budget = budget
        self._kept: OrderedDict[Hashable, list[_Read]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of bodies kept now."""
        return self._size

    def read(self, dialect: Dialect, caller: Hashable, body: bytes) -> tuple[ModelRequest, HashChain]:
        """The request, and the chain of its messages."""
        if len(body) < _WORTHWHILE or not dialect.parses_messages_independently:
            return self._plain(dialect, body)
        where = (dialect.name, caller)
        known, count = self._longest(where, body)
        read = self._continued(dialect, body, known, count) if known else None
        if read is not None:
            self._keep(where, read, known)
            return read.request, read.chain
        request, chain = self._plain(dialect, body)
        found = _ends(body) if request.unsupported_error is None else None
        if found is not None:
            begin, ends = found
            self._keep(where, _Read(body, ends, begin, request, chain), None)
        return request, chain

    def _continued(self, dialect: Dialect, body: bytes, known: _Read, count: int) -> _Read | None:
        """With the first ``count`` messages taken from ``known``. None where the rest is not to be read by
        itself: a fault is told by where it is in the whole."""
        begin = known.begin
        start = _next(body, known.ends[count - 1])
        rest = body[:begin] + body[start:]
        try:
            read = dialect.parse_request(rest)
        except ApiError:
            return None
        found = _ends(rest) if read.unsupported_error is None else None
        # The same key may come again later in a body, and then it is the later one that counts.
        if found is None or rest[begin : found[0]].strip() or found[0] < begin:
            return None
        request = replace(read, messages=known.request.messages[:count] + read.messages)
        same = request.tools == known.request.tools
        tools = known.chain.tools_digest if same else self._hasher.hash_tools(request.tools)
        before = known.chain.prefix(count).with_tools(tools)
        chain = before.extend(map(self._hasher.hash_message, read.messages))
        ends = known.ends[:count] + [end + start - begin for end in found[1]]
        return _Read(body, ends, begin, request, chain)

    def _plain(self, dialect: Dialect, body: bytes) -> tuple[ModelRequest, HashChain]:
        request = dialect.parse_request(body)
        return request, self._hasher.hash_messages(request.messages, request.tools)

    def _longest(self, where: Hashable, body: bytes) -> tuple[_Read | None, int]:
        """The kept body that shares the most messages, and how many. One message at least is left over."""
        best: _Read | None = None
        most = 0
        for kept in self._kept.get(where, ()):
            same = _same_bytes(kept.body, body)
            count = bisect_right(kept.ends, same)
            while count and _next(body, kept.ends[count - 1]) == 0:
                count -= 1
            if count > most:
                best, most = kept, count
        return best, most

    def _keep(self, where: Hashable, read: _Read, instead: _Read | None) -> None:
        kept = self._kept.setdefault(where, [])
        self._kept.move_to_end(where)
        if instead is not None and len(instead.ends) <= len(read.ends):
            kept.remove(instead)
            self._size -= len(instead.body)
        kept.append(read)
        self._size += len(read.body)
        if len(kept) > _CANDIDATES:
            self._size -= len(kept.pop(0).body)
        while self._size > self._budget:
            _, dropped = self._kept.popitem(last=False)
            self._size -= sum(len(entry.body) for entry in dropped)


def _same_bytes(a: bytes, b: bytes) -> int:
    """How many leading bytes are the same."""
    length = min(len(a), len(b))
    if a[:256] != b[:256]:  # most others differ at once
        length = min(length, 256)
    x, y = np.frombuffer(a, np.uint8, length), np.frombuffer(b, np.uint8, length)
    different = x != y
    at = int(different.argmax())
    return at if different[at] else length


def _next(body: bytes, end: int) -> int:
    """Where the message behind the one that ends at ``end`` begins; 0 when there is none."""
    while body[end : end + 1] and body[end] in _SPACE:
        end += 1
    return end + 1 if body[end : end + 1] == b"," else 0


def _ends(body: bytes) -> tuple[int, list[int]] | None:
    """Where the first message begins and where each one ends. msgspec gives views of the body itself, so
    their addresses tell."""
    try:
        raws = msgspec.json.decode(body, type=_Messages).messages
    except msgspec.DecodeError:
        return None
    origin = _address(body)
    starts = [_address(raw) - origin for raw in raws]
    if not starts or not 0 <= starts[0] < len(body):
        return None
    return starts[0], [start + len(memoryview(raw)) for start, raw in zip(starts, raws, strict=True)]


def _address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data
