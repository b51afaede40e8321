"""Load from wrk: one cell of the table is one server under one kind of request."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway_parts.processes import DidNotStart, usage
from gateway_parts.stub import DEBIAN, REPLY

SCRIPT = Path(__file__).with_name("request.lua")
SMALL, LARGE = 1_000, 400_000
LONG_SESSIONS = 32
"""Sessions with a long history; more connections share them."""


@dataclass(frozen=True)
class Target:
    """A server under load."""

    name: str
    label: str
    url: str
    sessions: Sequence[tuple[str, str]]
    """(path, key) of each session, as many as the most connections."""
    pid: int
    """The one process that is measured."""
    knows_sessions: bool = False
    """It recognizes a request that extends an earlier one."""


@dataclass(frozen=True)
class Kind:
    """A kind of request: bytes, requests in flight, streamed or not."""

    size: int
    concurrency: int
    stream: bool

    @property
    def name(self) -> str:
        return f"{self.size // 1000}kb_c{self.concurrency}{'_stream' if self.stream else ''}"


@dataclass(frozen=True)
class Cell:
    rate: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """CPU time of the server's process for each request."""
    rss_mb: float
    error: str | None = None


def body(size: int, stream: bool) -> str:
    """A chat request of about this many bytes, with places for a session's number and for what makes it
    unique. A long one is a late turn of a session, at some 3.3 bytes a token."""
    return _written(_messages(size), stream)


def _messages(size: int) -> list[dict[str, str]]:
    count = 200 if size == LARGE else 2
    room = size // count - 48
    messages = [{"role": "system", "content": f"You are worker @SESSION@. {filler(room)}"}]
    for n in range(1, count):
        role = "user" if n % 2 else "assistant"
        messages.append({"role": role, "content": f"Step {n}: {filler(room, n)}"})
    if count > 2:
        messages[-2] = {"role": "assistant", "content": REPLY}
    messages[-1] = {"role": "user", "content": f"Do @NONCE@ now: {filler(room, count)}"}
    return messages


def _written(messages: list[dict[str, str]], stream: bool) -> str:
    return json.dumps({"model": "bench", "stream": stream, "messages": messages}, separators=(",", ":"))


def filler(length: int, seed: int = 0) -> str:
    """Text as a log has it: words and figures."""
    lines, size = list[str](), 0
    while size < length:
        seed = (seed * 1103515245 + 12345) % 2**31
        lines.append(f"at {seed % 977} the worker's queue holds {seed % 89} items that came in late; ")
        size += len(lines[-1])
    return "".join(lines)[: max(0, length)]


def measure(target: Target, kind: Kind, seconds: float, folder: Path, seed: str) -> Cell:
    """One cell, once. Answers that are not 2xx make it invalid."""
    sessions = target.sessions[
        : min(kind.concurrency, LONG_SESSIONS) if kind.size == LARGE else kind.concurrency
    ]
    request, chosen = folder / "body.json", folder / "sessions.txt"
    request.write_text(body(kind.size, kind.stream))
    chosen.write_text("".join(f"{path} {key}\n" for path, key in sessions))
    before = usage(target.pid)
    options = ["-t1", f"-c{kind.concurrency}", f"-d{math.ceil(seconds)}s", "--timeout", "30s"]
    output = subprocess.run(
        [wrk(), *options, "-s", str(SCRIPT), target.url, "--", str(request), str(chosen), seed],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 120,
    )
    after = usage(target.pid)
    found = [line.split()[1:] for line in output.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise DidNotStart(f"wrk failed: {(output.stderr or output.stdout).strip()[-160:]}")
    done, micros, p50, p99, refused, broken, late = map(float, found[0])
    problems = {"answers were no success": refused, "broken connections": broken, "timeouts": late}
    error = "; ".join(f"{count:.0f} {what}" for what, count in problems.items() if count)
    return Cell(
        rate=done / (micros / 1e6),
        p50_ms=p50 / 1000,
        p99_ms=p99 / 1000,
        cpu_ms=1000 * (after.cpu_s - before.cpu_s) / max(done, 1),
        rss_mb=after.rss_mb,
        error=error or (None if done else f"no answer within {math.ceil(seconds)} s"),
    )


def median(cells: Sequence[Cell]) -> Cell:
    """Of several rounds; a bad round makes the whole cell invalid."""
    values = {
        name: statistics.median(getattr(cell, name) for cell in cells)
        for name in ("rate", "p50_ms", "p99_ms", "cpu_ms")
    }
    errors = [cell.error for cell in cells if cell.error]
    return Cell(**values, rss_mb=cells[-1].rss_mb, error=errors[0] if errors else None)


def begin(target: Target) -> None:
    """The turn before the long requests, in each of their sessions: they extend what was recorded of it."""
    template = _written(_messages(LARGE)[:-2], stream=False)
    for n, (path, key) in enumerate(target.sessions[:LONG_SESSIONS]):
        _post(target, path, key, template.replace("@SESSION@", f"{n:08d}"), stream=False)


def check(target: Target, size: int, stream: bool) -> None:
    """One request; raises DidNotStart unless the reply is the one that everyone is to give."""
    (path, key), filled = target.sessions[0], body(size, stream)
    _post(target, path, key, filled.replace("@SESSION@", f"{0:08d}").replace("@NONCE@", "hello"), stream)


def _post(target: Target, path: str, key: str, filled: str, stream: bool) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(target.url + path, filled.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise DidNotStart(f"answers {error.code}: {error.read().decode(errors='replace')[:160]}") from error
    except OSError as error:
        raise DidNotStart(f"does not answer: {error}") from error
    reply = _streamed(text) if stream else json.loads(text)["choices"][0]["message"]["content"]
    if reply != REPLY:
        raise DidNotStart(f"answers with something else: {text[:160]}")


def _streamed(text: str) -> str:
    """What the events of a stream say; nothing when its end is missing."""
    events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    if not events or events[-1] != "[DONE]":
        return ""
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def wrk() -> str:
    program = shutil.which("wrk")
    if program is None:
        raise DidNotStart(f"wrk is missing: {DEBIAN}")
    return program
