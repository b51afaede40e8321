from __future__ import annotations

import random

import pytest

from instar.gateway.upstream.http_response import EventSplitter

STREAM = (
    ": ping\n\n"
    'data: {"a": "Grüße 世界 🌍"}\n\n'
    "event: message_stop\r\ndata: {}\r\n\r\n"
    "data: one\ndata:two\nid: 3\n\n"
    "data: mixed\n\r\n"
    "data: old\r\r"
    "\n"
    "data: [DONE]\n\n"
).encode()
EXPECTED_DATA = [b"", '{"a": "Grüße 世界 🌍"}'.encode(), b"{}", b"one\ntwo", b"mixed", b"old", b"[DONE]"]


def split(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    """Return the data of each event, and the raw bytes of all events."""
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    if rest := splitter.flush():
        events.append(rest)
    return [event.data for event in events], b"".join(event.raw for event in events)


@pytest.mark.parametrize("seed", range(200))
def test_event_splitter_yields_the_same_events_for_any_split(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(STREAM)), rng.randrange(len(STREAM))))
    pieces = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    data, raw = split(pieces)
    assert data == EXPECTED_DATA
    assert raw == STREAM


def test_event_splitter_flushes_an_event_without_blank_line() -> None:
    assert split([b"data: a\n\nda", b"ta: [DONE]\n"]) == ([b"a", b"[DONE]"], b"data: a\n\ndata: [DONE]\n")


def test_event_splitter_assembles_a_large_event_from_many_pieces() -> None:
    event = b"data: " + b"x" * 2_000_000 + b"\n\n"
    data, _ = split([event[i : i + 16384] for i in range(0, len(event), 16384)])
    assert len(data[0]) == 2_000_000
