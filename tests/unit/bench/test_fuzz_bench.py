"""Tests for bench/fuzz.py: generated requests and response parsing."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """The module bench/fuzz_parts/cases.py, imported with bench/ on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("fuzz_parts.cases")
    for name in [name for name in sys.modules if name.split(".")[0] == "fuzz_parts"]:
        del sys.modules[name]


def make_routes_and_pool(cases: ModuleType) -> tuple[list[Any], Any]:
    routes = cases.list_routes(json.loads((ROOT / "docs" / "openapi.json").read_text()))
    sessions = [(f"sess-{number}", f"key-{number}") for number in range(4)]
    return routes, cases.Pool("admin", "agent", sessions)


def test_fuzz_cases_with_the_same_seed_are_equal(cases: ModuleType) -> None:
    routes, pool = make_routes_and_pool(cases)
    first = [cases.make_case(1, number, routes, pool) for number in range(300)]
    assert first == [cases.make_case(1, number, routes, pool) for number in range(300)]
    assert len({case.name for case in first}) > 50
    assert any(case.script for case in first)
    assert not any(cases.make_case(1, number, routes, pool, is_valid=True).script for number in range(50))


def test_fuzz_bodies_cover_every_route_with_a_body(cases: ModuleType) -> None:
    from fuzz_parts.bodies import find_bodies  # pyright: ignore[reportMissingImports]

    routes, _ = make_routes_and_pool(cases)
    missing = [
        route.path for route in routes if route.method == "POST" and find_bodies(route.path) == [b"{}"]
    ]
    assert missing == []


def test_fuzz_client_reads_pipelined_chunked_and_unfinished_responses(cases: ModuleType) -> None:
    from fuzz_parts.client import Connection  # pyright: ignore[reportMissingImports]

    raw = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nend"
    )
    for size in (1, 7, len(raw)):
        connection = Connection()
        for start in range(0, len(raw), size):
            connection.data_received(raw[start : start + size])
        assert [reply.body for reply in connection.replies] == [b"ok", b"abcd"]
        connection.connection_lost(None)
        assert [reply.status for reply in connection.replies] == [200, 200, 400]
        assert connection.replies[-1].is_last
