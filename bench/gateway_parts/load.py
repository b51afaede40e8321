"""Generate load with wrk. Each cell of the results is one server with one kind of request."""

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

from gateway_parts.processes import MeasurementError, read_usage
from gateway_parts.stub import INSTALL_COMMAND, REPLY

SCRIPT = Path(__file__).with_name("request.lua")
SMALL, LARGE = 1_000, 400_000
LONG_SESSIONS = 32
"""The number of sessions with a long history. Additional connections share them."""


@dataclass(frozen=True)
class Target:
    """A server under load."""

    name: str
    label: str
    url: str
    sessions: Sequence[tuple[str, str]]
    """The path and key of each session. There are as many as the maximum number of connections."""
    pid: int
    """The process to measure."""
    extends_calls: bool = False
    """True if the server recognizes requests that extend an earlier call."""


@dataclass(frozen=True)
class RequestKind:
    """The size of the requests in bytes, the number in flight, and whether replies are streamed."""

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
    """CPU time of the server process per request."""
    rss_mb: float
    error: str | None = None
    """The reason why the cell is invalid."""


def make_body(size: int, stream: bool) -> str:
    """Return a chat request of about ``size`` bytes, with the placeholders @SESSION@ and @NONCE@.

    A request of size LARGE is a late turn of a session, with about 3.3 bytes per token.
    """
    return _encode_body(_make_messages(size), stream)


def _make_messages(size: int) -> list[dict[str, str]]:
    count = 200 if size == LARGE else 2
    content_size = size // count - 48
    messages = [{"role": "system", "content": f"You are worker @SESSION@. {make_filler(content_size)}"}]
    for number in range(1, count):
        role = "user" if number % 2 else "assistant"
        messages.append({"role": role, "content": f"Step {number}: {make_filler(content_size, number)}"})
    if count > 2:
        messages[-2] = {"role": "assistant", "content": REPLY}
    messages[-1] = {"role": "user", "content": f"Do @NONCE@ now: {make_filler(content_size, count)}"}
    return messages


def _encode_body(messages: list[dict[str, str]], stream: bool) -> str:
    return json.dumps({"model": "bench", "stream": stream, "messages": messages}, separators=(",", ":"))


def make_filler(length: int, seed: int = 0) -> str:
    """Return text that resembles a log, with words and numbers."""
    lines: list[str] = []
    size = 0
    while size < length:
        seed = (seed * 1103515245 + 12345) % 2**31
        lines.append(f"at {seed % 977} the worker's queue holds {seed % 89} items that came in late; ")
        size += len(lines[-1])
    return "".join(lines)[: max(0, length)]


def measure_cell(target: Target, kind: RequestKind, seconds: float, folder: Path, seed: str) -> Cell:
    """Measure one cell once. Failed requests set its ``error``. Raises MeasurementError if wrk fails."""
    sessions = target.sessions[
        : min(kind.concurrency, LONG_SESSIONS) if kind.size == LARGE else kind.concurrency
    ]
    request_path, sessions_path = folder / "body.json", folder / "sessions.txt"
    request_path.write_text(make_body(kind.size, kind.stream))
    sessions_path.write_text("".join(f"{path} {key}\n" for path, key in sessions))
    before = read_usage(target.pid)
    options = ["-t1", f"-c{kind.concurrency}", f"-d{math.ceil(seconds)}s", "--timeout", "30s"]
    output = subprocess.run(
        [
            find_wrk(),
            *options,
            "-s",
            str(SCRIPT),
            target.url,
            "--",
            str(request_path),
            str(sessions_path),
            seed,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 120,
    )
    after = read_usage(target.pid)
    results = [line.split()[1:] for line in output.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        raise MeasurementError(f"wrk failed: {(output.stderr or output.stdout).strip()[-160:]}")
    completed, microseconds, p50, p99, rejected, broken, timed_out = map(float, results[0])
    problems = {
        "responses failed": rejected,
        "connections broke": broken,
        "requests timed out": timed_out,
    }
    error = "; ".join(f"{count:.0f} {problem}" for problem, count in problems.items() if count)
    return Cell(
        rate=completed / (microseconds / 1e6),
        p50_ms=p50 / 1000,
        p99_ms=p99 / 1000,
        cpu_ms=1000 * (after.cpu_seconds - before.cpu_seconds) / max(completed, 1),
        rss_mb=after.rss_mb,
        error=error or (None if completed else f"no response within {math.ceil(seconds)} s"),
    )


def compute_median_cell(cells: Sequence[Cell]) -> Cell:
    """Return the medians of several rounds, and the memory after the last one.

    One invalid round makes the cell invalid.
    """
    values = {
        name: statistics.median(getattr(cell, name) for cell in cells)
        for name in ("rate", "p50_ms", "p99_ms", "cpu_ms")
    }
    errors = [cell.error for cell in cells if cell.error]
    return Cell(**values, rss_mb=cells[-1].rss_mb, error=errors[0] if errors else None)


def start_long_sessions(target: Target) -> None:
    """Send the turn that precedes the large requests in each session, so that they extend a recorded call."""
    template = _encode_body(_make_messages(LARGE)[:-2], stream=False)
    for number, (path, key) in enumerate(target.sessions[:LONG_SESSIONS]):
        _post_and_check(target, path, key, template.replace("@SESSION@", f"{number:08d}"), stream=False)


def check_reply(target: Target, size: int, stream: bool) -> None:
    """Send one request. Raises MeasurementError if the reply is not the expected one."""
    (path, key), body = target.sessions[0], make_body(size, stream)
    _post_and_check(
        target, path, key, body.replace("@SESSION@", f"{0:08d}").replace("@NONCE@", "hello"), stream
    )


def _post_and_check(target: Target, path: str, key: str, body: str, stream: bool) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(target.url + path, body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")[:160]
        raise MeasurementError(f"the server responded with status {error.code}: {message}") from error
    except OSError as error:
        raise MeasurementError(f"the server did not respond: {error}") from error
    reply = _join_stream(text) if stream else json.loads(text)["choices"][0]["message"]["content"]
    if reply != REPLY:
        raise MeasurementError(f"the server sent an unexpected reply: {text[:160]}")


def _join_stream(text: str) -> str:
    """Return the text of a streamed reply, or an empty string if its end is missing."""
    events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    if not events or events[-1] != "[DONE]":
        return ""
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def find_wrk() -> str:
    program = shutil.which("wrk")
    if program is None:
        raise MeasurementError(f"wrk is not installed; run {INSTALL_COMMAND}")
    return program
