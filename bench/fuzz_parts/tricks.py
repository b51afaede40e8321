"""Connections that violate HTTP, or that stop sending or reading halfway."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Step:
    kind: Literal["send", "sleep", "pause_reading", "resume_reading", "end_of_input", "abort"]
    """``end_of_input`` closes only the sending side, ``abort`` resets the connection."""
    data: bytes = b""
    seconds: float = 0.0
    """The duration of a ``sleep``."""


@dataclass(frozen=True, slots=True)
class Script:
    """The steps of one connection.

    Afterwards, the server must send ``responses`` responses or close the connection.
    """

    steps: tuple[Step, ...]
    requests: int = 1
    responses: int = 1


Trick = Callable[[random.Random, bytes, bytes], Script]


def make_script(rng: random.Random, head: bytes, body: bytes) -> tuple[str, Script]:
    """Apply a random trick and return its name and script.

    ``head`` must not contain Content-Length or the empty line after the headers.
    """
    trick = rng.choice(_TRICKS)
    return trick.__name__.lstrip("_"), trick(rng, head, body)


def _make_send_script(
    *parts: bytes, end: Step | None = None, requests: int = 1, responses: int = 1
) -> Script:
    steps = [Step("send", part) for part in parts]
    return Script((*steps, *([end] if end else [])), requests, responses)


def _encode_request(head: bytes, body: bytes) -> bytes:
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


def _encode_chunked(head: bytes, *chunks: bytes) -> bytes:
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


def _encode_chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


_LAST_CHUNK = b"0\r\n\r\n"


def _garbage(rng: random.Random, head: bytes, body: bytes) -> Script:
    line = rng.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            b"GET /\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1 HTTP/1.1\r\n\r\n",
            b"\r\n" * 50,
            b"\n",
            b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\n\r\n",
            b"SSH-2.0-x\r\n",
            rng.randbytes(rng.randrange(1, 2000)),
        )
    )
    return _make_send_script(line, end=Step("end_of_input"))


def _bad_header(rng: random.Random, head: bytes, body: bytes) -> Script:
    header = rng.choice(
        (
            b"No colon here\r\n",
            b": no name\r\n",
            b"Sp ace: x\r\n",
            b"Nul: a\x00b\r\n",
            b"Fold: a\r\n  b\r\n",
            b"Bare: a\rb\r\n",
            b"Utf: \xc3\xa9\xff\r\n",
            b"X: " + b"y" * rng.choice((60_000, 70_000, 130_000, 400_000)) + b"\r\n",
            b"".join(b"X-%d: y\r\n" % number for number in range(rng.choice((200, 5000)))),
            b"Host: second\r\nHost: third\r\n",
            b"Connection: close, keep-alive, x\r\n",
        )
    )
    return _make_send_script(_encode_request(head + header, body), end=Step("end_of_input"))


def _bad_length(rng: random.Random, head: bytes, body: bytes) -> Script:
    length = rng.choice(
        (b"-1", b"+5", b"0x10", b"1e3", b"9" * 30, b"18446744073709551616", b"5, 5", b"", b"5 5")
    )
    return _make_send_script(
        head + b"Content-Length: " + length + b"\r\n\r\n" + body, end=Step("end_of_input")
    )


def _two_lengths(rng: random.Random, head: bytes, body: bytes) -> Script:
    lengths = rng.choice(((len(body), len(body) + 1), (len(body), len(body)), (0, len(body)), (len(body), 0)))
    lines = b"".join(b"Content-Length: %d\r\n" % length for length in lengths)
    return _make_send_script(head + lines + b"\r\n" + body, end=Step("end_of_input"))


def _length_and_chunks(rng: random.Random, head: bytes, body: bytes) -> Script:
    raw = _encode_chunked(
        head + b"Content-Length: %d\r\n" % rng.choice((0, 3, len(body))), _encode_chunk(body), _LAST_CHUNK
    )
    return _make_send_script(raw, end=Step("end_of_input"))


def _chunks(rng: random.Random, head: bytes, body: bytes) -> Script:
    """A valid chunked body in two packets."""
    middle = rng.randrange(len(body) + 1)
    parts = [part for part in (body[:middle], body[middle:]) if part]
    extension = rng.choice((b"", b";a=b", b";" + b"x" * 200))
    trailer = rng.choice((_LAST_CHUNK, b"0\r\nX-Trailer: y\r\n\r\n", b"000\r\n\r\n"))
    raw = _encode_chunked(head, *(_encode_chunk(part, extension) for part in parts), trailer)
    cut = rng.randrange(1, len(raw))
    return Script((Step("send", raw[:cut]), Step("sleep", seconds=0.01), Step("send", raw[cut:])))


def _tiny_chunks(rng: random.Random, head: bytes, body: bytes) -> Script:
    body = body[:5000]
    return _make_send_script(
        _encode_chunked(head, *(_encode_chunk(body[i : i + 1]) for i in range(len(body))), _LAST_CHUNK)
    )


def _bad_chunks(rng: random.Random, head: bytes, body: bytes) -> Script:
    chunk = rng.choice(
        (
            b"zz\r\n" + body + b"\r\n",
            b"-5\r\nhello\r\n",
            b"ffffffffffffffffff\r\n" + body,
            b"5\r\nhel",
            b"3\r\nhello\r\n",
            b"\r\n\r\n",
            b"5\nhello\n",
            b"5 ;\r\nhello\r\n",
            _encode_chunk(body) + b"0\r\nBad trailer\r\n\r\n",
            _encode_chunk(body) + b"0\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        )
    )
    encoding = rng.choice(
        (b"chunked", b"gzip, chunked", b"chunked, identity", b"Chunked", b"xchunked", b"chunked\x00")
    )
    raw = head + b"Transfer-Encoding: " + encoding + b"\r\n\r\n" + chunk + _LAST_CHUNK
    return _make_send_script(raw, end=Step("end_of_input"))


def _pipeline(rng: random.Random, head: bytes, body: bytes) -> Script:
    """Several requests sent before the first response."""
    count = rng.choice((2, 2, 3, 5, 20))
    requests = [_encode_request(head, body)] * count
    return _make_send_script(b"".join(requests), requests=count, responses=count)


def _pipeline_then_garbage(rng: random.Random, head: bytes, body: bytes) -> Script:
    garbage = rng.choice(
        (
            b"\x00\xff\r\n\r\n",
            b"GET / HTTP/1.1\r\nNo colon\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        )
    )
    return _make_send_script(_encode_request(head, body) + garbage, end=Step("end_of_input"), requests=2)


def _pipeline_then_abort(rng: random.Random, head: bytes, body: bytes) -> Script:
    return _make_send_script(_encode_request(head, body) * 3, end=Step("abort"), requests=3, responses=0)


def _trickle(rng: random.Random, head: bytes, body: bytes) -> Script:
    """A valid request split into many packets."""
    raw = _encode_request(head, body)
    size = max(1, len(raw) // 40)
    steps: list[Step] = []
    for start in range(0, len(raw), size):
        steps += [Step("send", raw[start : start + size]), Step("sleep", seconds=0.002)]
    return Script(tuple(steps))


def _half_head(rng: random.Random, head: bytes, body: bytes) -> Script:
    return _make_send_script(head[: rng.randrange(1, len(head))], end=_choose_end(rng))


def _half_body(rng: random.Random, head: bytes, body: bytes) -> Script:
    raw = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body) + rng.choice((1, 100, 10**9)), body)
    return _make_send_script(raw, end=_choose_end(rng))


def _half_chunk(rng: random.Random, head: bytes, body: bytes) -> Script:
    return _make_send_script(_encode_chunked(head, b"%x\r\n%b" % (len(body) + 1, body)), end=_choose_end(rng))


def _choose_end(rng: random.Random) -> Step | None:
    """Return the step with which the client ends the connection, or None to wait for the server's timeout."""
    draw = rng.random()
    return None if draw < 0.1 else Step("end_of_input") if draw < 0.5 else Step("abort")


def _abort(rng: random.Random, head: bytes, body: bytes) -> Script:
    """A complete request whose client disconnects before, or shortly after, the response begins."""
    wait = Step("sleep", seconds=rng.choice((0.0, 0.001, 0.01, 0.05)))
    return Script((Step("send", _encode_request(head, body)), wait, Step("abort")), responses=0)


def _end_of_input(rng: random.Random, head: bytes, body: bytes) -> Script:
    return _make_send_script(_encode_request(head, body), end=Step("end_of_input"), responses=0)


def _slow_reader(rng: random.Random, head: bytes, body: bytes) -> Script:
    ends = ((Step("abort"),), (Step("resume_reading"),))
    body = body.replace(b'"n": 2', b'"n": 120').replace(b'"stream": false', b'"stream": true')
    steps = (
        Step("pause_reading"),
        Step("send", _encode_request(head, body)),
        Step("sleep", seconds=rng.choice((0.2, 1.0))),
    )
    end = rng.choice(ends)
    return Script(steps + end, responses=0 if end[0].kind == "abort" else 1)


def _upgrade(rng: random.Random, head: bytes, body: bytes) -> Script:
    protocol = rng.choice((b"websocket", b"h2c", b"TLS/1.0", b"websocket, foo"))
    headers = b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\nSec-WebSocket-Version: 13\r\n"
    headers += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    return _make_send_script(_encode_request(head + headers, body), end=Step("end_of_input"))


def _other_version(rng: random.Random, head: bytes, body: bytes) -> Script:
    version = rng.choice((b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"http/1.1"))
    return _make_send_script(
        _encode_request(head.replace(b"HTTP/1.1", version, 1), body), end=Step("end_of_input")
    )


_TRICKS: tuple[Trick, ...] = (
    _garbage, _bad_header, _bad_length, _two_lengths, _length_and_chunks, _chunks, _tiny_chunks, _bad_chunks,
    _pipeline, _pipeline_then_garbage, _pipeline_then_abort, _trickle, _half_head, _half_body, _half_chunk,
    _abort, _end_of_input, _slow_reader, _upgrade, _other_version,
)  # fmt: skip
