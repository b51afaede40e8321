"""Server-sent events, cut out of a stream of bytes that comes in pieces of any size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# Two line ends in a row. A line ends with \r\n, \n or \r, and \r\n is one line end.
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class ServerSentEvent(NamedTuple):
    raw: bytes
    """Every byte of it, blank line and all: those of all events add up to the stream."""
    data: bytes
    """Empty for a comment."""


class EventSplitter:
    def __init__(self) -> None:
        self._rest = b""
        self._seen = 0  # of the rest: no event ends before here

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """The events that are complete by now."""
        stream = self._rest + piece if self._rest else piece
        start = 0
        for end in _BLANK_LINE.finditer(stream, self._seen):
            raw = stream[start : end.end()]
            start = end.end()
            yield ServerSentEvent(raw, _data(raw))
        self._rest = stream[start:]
        self._seen = max(0, len(self._rest) - 3)

    def flush(self) -> ServerSentEvent | None:
        """What is left when the stream has ended: some leave out the last blank line."""
        raw, self._rest, self._seen = self._rest, b"", 0
        return ServerSentEvent(raw, _data(raw)) if raw else None


def _data(raw: bytes) -> bytes:
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and raw.endswith(b"\n\n") and b"\r" not in raw:
        return raw[6:-2]
    lines = [line for line in _LINE_END.split(raw) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
