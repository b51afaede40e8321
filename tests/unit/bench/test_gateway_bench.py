"""Tests for bench/gateway.py: the requests that it sends and the metrics that it computes."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[3] / "bench"
needs_programs = pytest.mark.skipif(
    not (shutil.which("wrk") and Path("/usr/lib/nginx/modules/ngx_http_lua_module.so").is_file()),
    reason="needs wrk and nginx: apt-get install nginx libnginx-mod-http-lua wrk",
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """The module bench/gateway.py, imported with its folder on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("gateway")
    for name in [name for name in sys.modules if name.split(".")[0] in ("gateway", "gateway_parts")]:
        del sys.modules[name]


@pytest.mark.parametrize(("size", "message_count"), [(1_000, 2), (400_000, 200)])
def test_gateway_bench_bodies_have_size_and_placeholders(
    bench: ModuleType, size: int, message_count: int
) -> None:
    from gateway_parts.load import make_body  # pyright: ignore[reportMissingImports]

    body = make_body(size, stream=True)
    request = json.loads(body)
    assert abs(len(body) - size) < 0.06 * size
    assert len(request["messages"]) == message_count
    assert request["stream"] is True
    assert "@SESSION@" in request["messages"][0]["content"]
    assert "@NONCE@" in request["messages"][-1]["content"]
    assert request["messages"][-1]["role"] == "user"


def test_gateway_bench_conversation_sends_full_history(bench: ModuleType) -> None:
    from gateway_parts.conversations import Conversation  # pyright: ignore[reportMissingImports]

    conversation = Conversation(number=3, size=100)
    conversation.next_request()
    conversation.add_reply("first")
    messages = json.loads(conversation.next_request())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "first"
    skipped = Conversation(number=3, size=100)
    skipped.skip_to(1)
    assert skipped.turn == 1
    assert json.loads(b"[" + skipped.messages + b"]")[0] == messages[0]


def test_gateway_bench_invalid_cell_has_no_ratio(bench: ModuleType) -> None:
    from gateway_parts.load import Cell, compute_median_cell  # pyright: ignore[reportMissingImports]

    small, _ = bench.HEADLINE_KINDS
    valid, invalid = Cell(100, 1, 2, 3, 4), Cell(400, 1, 2, 3, 4, error="7 responses failed")
    cells = {"proxy": {small: valid}, "litellm": {small: Cell(50, 1, 2, 3, 4)}, "rllm": {small: invalid}}
    metrics = bench.compute_ratios(cells)
    assert metrics["ratio_litellm"] == 2
    assert metrics["ratio_rllm"] is None
    assert metrics["share_of_floor"] is None
    assert compute_median_cell([valid, invalid, valid]).error == invalid.error


@needs_programs
def test_gateway_bench_rejected_requests_invalidate_a_cell(bench: ModuleType, tmp_path: Path) -> None:
    from gateway_parts.load import RequestKind, Target, measure_cell  # pyright: ignore[reportMissingImports]
    from gateway_parts.servers import start_floor  # pyright: ignore[reportMissingImports]
    from gateway_parts.stub import start_stub  # pyright: ignore[reportMissingImports]

    with start_stub(tmp_path / "stub") as url, start_floor(tmp_path / "floor", url) as target:
        cell = measure_cell(target, RequestKind(1_000, 4, False), 1, tmp_path, "a")
        assert cell.error is None
        assert cell.rate > 10
        assert cell.p99_ms >= cell.p50_ms > 0
        missing = Target("missing", "missing", target.url, [("/missing", "key")] * 4, target.pid)
        assert "responses failed" in (
            measure_cell(missing, RequestKind(1_000, 4, False), 1, tmp_path, "b").error or ""
        )
