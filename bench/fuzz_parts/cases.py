"""Generate the fuzzer's requests. A case depends only on its seed, the routes and the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from fuzz_parts.bodies import AGENT_SESSION, CALL, RESPONSE, SESSION, make_body, make_valid_body
from fuzz_parts.tricks import Script, make_script

RAW_FRACTION = 0.15
"""The fraction of cases that violate HTTP, or that stop sending or reading halfway."""
AGENT_SESSION_CASES = 2000
"""The number of successive cases that use the same agent session ids."""
_METHODS = ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST", "QUERY", "get"]
_HEADERS: list[tuple[str, list[str]]] = [
    ("X-Instar-Session", ["n\xf6\t", "%00../", SESSION, "x" * 3000, ""]),
    ("X-Session-Id", ["\xff" * 300, AGENT_SESSION, " "]),
    ("X-Claude-Code-Session-Id", ["a" * 9000, AGENT_SESSION]),
    ("Idempotency-Key", ["key-1", "key-2", "key-3", "\xe9" * 5000, ""]),
    ("X-Stainless-Retry-Count", ["1", "many", "-1", "0"]),
    ("Content-Encoding", ["gzip", "identity", "br, gzip", ""]),
    ("Content-Type", ["text/plain", "application/json; charset=utf-16", "multipart/form-data", "\x7f"]),
    ("Accept", ["nothing/at-all", "text/event-stream"]),
    ("Anthropic-Version", ["2023-06-01", "0"]),
    ("X-Forwarded-For", ["127.0.0.1, ::1", "'"]),
    ("Expect", ["100-continue", "200-ok"]),
    ("Range", ["bytes=0-1"]),
    ("If-None-Match", ["*"]),
    ("Cookie", ["a=b; " * 500]),
    ("Authorization", ["Bearer", "Basic YTpi", "Bearer \xff\xfe", "bearer  x  y"]),
    ("X-Api-Key", ["", "x" * 4000, "\xe9"]),
]
_PATH_SUFFIXES = [
    "/",
    "//",
    "/.",
    "/../stats",
    "%2f..%2fstats",
    "%00",
    "%ff%fe",
    "?x=%ff",
    "?session=%00",
    "?" + "a" * 3000,
]
_PATH_PREFIXES = [
    "/",
    "//",
    "/./",
    "/s/%2e%2e/v1",
    "/s//v1",
    "/s/a/b/v1",
    "http://127.0.0.1",
    "*",
    "/\xe9\xff",
    "/" + "p" * 9000,
]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    weight: int


@dataclass(slots=True)
class Pool:
    """Keys, and the ids of existing sessions, responses and calls, from which cases choose at random."""

    admin_key: str
    agent_key: str
    sessions: list[tuple[str, str]]
    """The ids and keys of open sessions."""
    response_ids: list[str] = field(default_factory=lambda: ["resp-none"] * 64)
    call_ids: list[str] = field(default_factory=lambda: ["call-none"] * 64)


@dataclass(frozen=True, slots=True)
class Case:
    seed: str
    name: str
    """The trick, if any, the method and the route."""
    raw: bytes
    """The bytes of a complete request, if the case has no script."""
    is_head_request: bool
    """True if the method is HEAD, so that the response has no body."""
    script: Script | None = None


def list_routes(description: dict[str, dict[str, dict[str, object]]]) -> list[Route]:
    """Return the routes of an OpenAPI description. POST routes weigh more, especially under /v1."""
    return [
        Route(method.upper(), path, 6 if "/v1" in path and method == "post" else 2 if method == "post" else 1)
        for path, item in description["paths"].items()
        for method in item
    ]


def make_case(base: int, number: int, routes: Sequence[Route], pool: Pool, *, is_valid: bool = False) -> Case:
    """Return the case with this base and number. With ``is_valid``, the gateway should accept the request."""
    rng = random.Random(f"{base}:{number}:{is_valid}")
    if is_valid:
        routes = [route for route in routes if route.weight == 6 and "/feedback" not in route.path]
    route = rng.choices(routes, [route.weight for route in routes])[0]
    session_id, session_key = rng.choice(pool.sessions)
    method, path = route.method, route.path.replace("{session}", session_id).replace("{model}", "default")
    if is_valid:
        body, key = make_valid_body(route.path, rng), session_key
    else:
        body = make_body(route.path, rng) if method == "POST" or rng.random() < 0.1 else b""
        key = _choose_key(rng, session_key, pool)
        method, path = _mutate_target(rng, method, path)
    agent_session = f"agent-{number // AGENT_SESSION_CASES}-{number % 4}"
    body = _fill_placeholders(body, rng, session_id, agent_session, pool)
    headers = [("Host", "gateway"), ("Content-Type", "application/json")]
    if key is not None:
        headers.append(("Authorization", f"Bearer {key}"))
    if not is_valid and rng.random() < 0.25:
        for name, values in rng.sample(_HEADERS, rng.choice((1, 1, 2, 4))):
            value = rng.choice(values).replace(SESSION, session_id)
            headers.append((name, value.replace(AGENT_SESSION, agent_session)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n"
    seed = f"{base}:{number}"
    if not is_valid and rng.random() < RAW_FRACTION:
        name, script = make_script(rng, head, body)
        sent = b"".join(step.data for step in script.steps)  # a trick may replace the method
        return Case(seed, f"{name} {method} {route.path}", b"", sent.startswith(b"HEAD "), script)
    raw = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
    return Case(seed, f"{method} {route.path}", raw, method == "HEAD")


def _choose_key(rng: random.Random, session_key: str, pool: Pool) -> str | None:
    draw = rng.random()
    if draw < 0.45:
        return session_key
    if draw < 0.65:
        return pool.agent_key
    if draw < 0.9:
        return pool.admin_key
    return rng.choice((None, "sk-unknown", rng.choice(pool.sessions)[1], pool.agent_key + "x"))


def _mutate_target(rng: random.Random, method: str, path: str) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.03:
        method = rng.choice(_METHODS)
    elif draw < 0.05:
        path += rng.choice(_PATH_SUFFIXES)
    elif draw < 0.07:
        path = rng.choice(_PATH_PREFIXES) + path
    return method, path


def _fill_placeholders(
    body: bytes, rng: random.Random, session_id: str, agent_session: str, pool: Pool
) -> bytes:
    """Replace the placeholders in the body with ids."""
    if b"@" in body:
        body = body.replace(SESSION.encode(), session_id.encode())
        body = body.replace(AGENT_SESSION.encode(), agent_session.encode())
        body = body.replace(RESPONSE.encode(), rng.choice(pool.response_ids).encode())
        body = body.replace(CALL.encode(), rng.choice(pool.call_ids).encode())
    return body
