"""Server-sent events, split out of a byte stream that arrives in pieces of any size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# An event ends with two line ends in a row. A line ends with \r\n, \n or \r, and \r\n is one line end.
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class ServerSentEvent(NamedTuple):
    raw: bytes
    """All bytes of the event, including its blank line. The raw bytes of all events together are the
    stream."""
    data: bytes
    """The data of the event; empty for a comment."""


class EventSplitter:
    def __init__(self) -> None:
        self._rest = b""
        self._searched = 0  # no event ends before this position of the rest

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that are now complete."""
        stream = self._rest + piece if self._rest else piece
        start = 0
        for end in _EVENT_END.finditer(stream, self._searched):
            raw = stream[start : end.end()]
            start = end.end()
            yield ServerSentEvent(raw, _data(raw))
        self._rest = stream[start:]
        self._searched = max(0, len(self._rest) - 3)

    def flush(self) -> ServerSentEvent | None:
        """Return the event that is left at the end of the stream, if any. Some servers omit the last blank
        line."""
        raw, self._rest, self._searched = self._rest, b"", 0
        return ServerSentEvent(raw, _data(raw)) if raw else None


def _data(raw: bytes) -> bytes:
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and raw.endswith(b"\n\n") and b"\r" not in raw:
        return raw[6:-2]
    lines = [line for line in _LINE_END.split(raw) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
