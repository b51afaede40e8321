"""Send fuzzing cases over many connections and check the responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import orjson

from fuzz_parts.cases import Case, Pool, Route, make_case
from fuzz_parts.client import Connection, Reply, connect, run_script

WORKER_COUNT = 16
MAX_CONCURRENT_SCRIPTS = 64
HANG_TIMEOUT_SECONDS = 20.0
"""A request without a response after this time counts as a hang. The gateway's own timeouts are shorter."""
DOCUMENTED_FAILURES = (502, 503, 504)
SESSION_COUNT = 64
MAX_SAVED_FAILURES = 2000
_INTERNAL_ERROR = b"Internal error; see the gateway"
_REPLY_ID = re.compile(rb'"id": ?"((?:chatcmpl|cmpl|resp|msg|gen)[-_][\w-]+)"')


@dataclass
class Counts:
    """The results since the last reset."""

    requests: int = 0
    server_errors: int = 0
    hangs: int = 0
    unavailable: int = 0
    """Responses with a documented 502, 503 or 504."""
    statuses: Counter[str] = field(default_factory=Counter[str])


class FailureLog:
    """Counts failures by description, and writes the first MAX_SAVED_FAILURES requests to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self._file: TextIO = path.open("a")

    def add(self, seed: str, name: str, problem: str, request: bytes = b"", response: bytes = b"") -> None:
        self.counts[f"{problem}: {name}"] += 1
        if self.counts.total() > MAX_SAVED_FAILURES:
            return
        row = {
            "seed": seed,
            "case": name,
            "problem": problem,
            "request": request[:20_000].decode("latin-1"),
            "response": response[:2000].decode("latin-1"),
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def find_problem(reply: Reply) -> str | None:
    """Return a description of what is wrong with the response, or None."""
    if reply.status >= 500 and reply.status not in DOCUMENTED_FAILURES:
        return f"status {reply.status}"
    if _INTERNAL_ERROR in reply.body:
        return "internal error in a stream"
    if reply.content_type.startswith(b"application/json") and reply.body:
        try:
            value = parse_json(reply.body)
        except ValueError:
            return "the response is not JSON"
        if reply.status >= 400 and not (isinstance(value, dict) and "error" in value):
            return "the error response has no `error` field"
    return None


def parse_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        return json.loads(body)  # orjson rejects integers beyond 64 bits


class Fuzzer:
    def __init__(
        self, address: tuple[str, int], base: int, routes: list[Route], pool: Pool, failures: FailureLog
    ) -> None:
        self.counts = Counts()
        self._address = address
        self._base = base
        self._routes = routes
        self._pool = pool
        self._failures = failures
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_SCRIPTS)
        self._scripts: set[asyncio.Task[None]] = set()

    async def run(self, start: int, count: int, *, is_valid: bool = False) -> None:
        """Send ``count`` cases, starting at ``start``. Scripts may still be running when this returns."""
        case_numbers = iter(range(start, start + count))
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKER_COUNT):
                group.create_task(self._run_worker(case_numbers, is_valid))

    def reset(self) -> None:
        self.counts = Counts()

    async def drain(self) -> None:
        """Wait for the scripts that are still running."""
        if self._scripts:
            await asyncio.wait(set(self._scripts))

    async def replay(self, number: int) -> list[Reply]:
        """Send one case, check it, and return the responses."""
        case = make_case(self._base, number, self._routes, self._pool)
        if case.script is None:
            connection = await self._exchange(case, None)
        else:
            connection = await connect(*self._address)
            connection.is_head_request = case.is_head_request
            is_done = await run_script(connection, case.script, HANG_TIMEOUT_SECONDS)
            self._check_connection(case, connection, is_done=is_done)
        connection.transport.abort()
        return connection.replies

    async def _run_worker(self, case_numbers: Iterator[int], is_valid: bool) -> None:
        connection: Connection | None = None
        for number in case_numbers:
            case = make_case(self._base, number, self._routes, self._pool, is_valid=is_valid)
            if case.script is None:
                connection = await self._exchange(case, connection, is_counted=not is_valid)
                if connection.is_closed or (connection.replies[-1:] and connection.replies[-1].is_last):
                    connection.transport.abort()
                    connection = None
            else:
                await self._slots.acquire()
                task = asyncio.create_task(self._run_script(case))
                self._scripts.add(task)
                task.add_done_callback(self._scripts.discard)
        if connection is not None:
            connection.transport.abort()

    async def _exchange(
        self, case: Case, connection: Connection | None, *, is_counted: bool = True
    ) -> Connection:
        """Send a complete request and check its response. Return the connection, which may be a new one."""
        is_reused = connection is not None
        if connection is None:
            connection = await connect(*self._address)
        connection.is_head_request = case.is_head_request
        connection.replies.clear()
        connection.transport.write(case.raw)
        is_done = await connection.wait(1, time.monotonic() + HANG_TIMEOUT_SECONDS)
        if is_done and not connection.replies and is_reused and connection.violation is None:
            # The server may have closed the connection before the request reached it.
            return await self._exchange(case, None, is_counted=is_counted)
        self.counts.requests += is_counted
        problem = connection.violation
        if not is_done:
            self.counts.hangs += 1
            problem = "no response"
            connection.transport.abort()
            connection.is_closed = True
        elif not connection.replies:
            problem = problem or "the connection closed without a response"
            self.counts.server_errors += 1
        else:
            self._record_reply(case, connection.replies[-1], case.raw)
        if problem is not None:
            self._failures.add(case.seed, case.name, problem, case.raw)
        return connection

    async def _run_script(self, case: Case) -> None:
        assert case.script is not None
        try:
            is_slow = any(step.kind == "pause_reading" for step in case.script.steps)
            connection = await connect(*self._address, is_slow=is_slow)
            connection.is_head_request = case.is_head_request
            is_done = await run_script(connection, case.script, HANG_TIMEOUT_SECONDS)
            self.counts.requests += case.script.requests
            self._check_connection(case, connection, is_done=is_done)
        except ConnectionError:
            self.counts.statuses["no connection"] += 1
        finally:
            self._slots.release()

    def _check_connection(self, case: Case, connection: Connection, *, is_done: bool) -> None:
        assert case.script is not None
        sent = b"".join(step.data for step in case.script.steps)
        for reply in connection.replies:
            self._record_reply(case, reply, sent)
        if connection.violation:
            self.counts.server_errors += 1
            self._failures.add(case.seed, case.name, connection.violation, sent)
        if not is_done:
            self.counts.hangs += 1
            problem = f"hung after {len(connection.replies)} of {case.script.responses} responses"
            self._failures.add(case.seed, case.name, problem, sent)

    def _record_reply(self, case: Case, reply: Reply, sent: bytes) -> None:
        """Count the reply and record any failure. The id of a successful reply replaces one in the pool."""
        self.counts.statuses[str(reply.status)] += 1
        if (problem := find_problem(reply)) is not None:
            self.counts.server_errors += 1
            self._failures.add(case.seed, case.name, problem, sent, reply.body)
        elif reply.status in DOCUMENTED_FAILURES:
            self.counts.unavailable += 1
            self._failures.add(case.seed, case.name, f"documented {reply.status}", sent, reply.body)
        elif reply.status == 200 and (match := _REPLY_ID.search(reply.body, 0, 300)):
            position = self.counts.requests % len(self._pool.response_ids)
            self._pool.response_ids[position] = match[1].decode()


async def refresh_pool(address: tuple[str, int], pool: Pool, interval_seconds: float = 0.2) -> None:
    """Keep replacing the pool's call ids and its sessions, which cases may end."""
    position = 0
    connection: Connection | None = None
    while True:
        if connection is None or connection.is_closed:
            connection = await connect(*address)
        with contextlib.suppress(ValueError, KeyError):
            pool.sessions[position % len(pool.sessions)] = await open_session(connection, pool)
            session_id = pool.sessions[(position + 7) % len(pool.sessions)][0]
            view = await send(connection, "GET", f"/sessions/{session_id}", pool.admin_key)
            for call in view["calls"][-1:]:
                pool.call_ids[position % len(pool.call_ids)] = call["call_id"]
        position += 1
        await asyncio.sleep(interval_seconds)


async def open_session(connection: Connection, pool: Pool) -> tuple[str, str]:
    opened = await send(connection, "POST", "/sessions", pool.admin_key, {})
    return opened["session_id"], opened["api_key"]


async def send(connection: Connection, method: str, path: str, key: str, body: object = None) -> Any:
    """Send a valid request and return the parsed JSON response. Raises ValueError if it fails."""
    content = b"" if body is None else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {key}\r\n"
    connection.replies.clear()
    connection.transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(content), content))
    await connection.wait(1, time.monotonic() + HANG_TIMEOUT_SECONDS)
    if not connection.replies or connection.replies[0].status >= 300:
        raise ValueError(f"{method} {path} failed: {connection.replies[:1]}")
    return parse_json(connection.replies[0].body)
