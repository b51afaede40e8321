"""Tests for restarts of a vLLM server and for the API key that it requires."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import instar
from instar.config import VllmEngineConfig
from instar.engines.vllm.auth import RequireKeyMiddleware
from instar.engines.vllm.command import MIDDLEWARE, VllmLaunch
from instar.engines.vllm.servers import ServerCallbacks, VllmProcess
from instar.errors import EngineError, EngineUnavailable
from tests.unit.engines.test_vllm import build_launch
from tests.unit.engines.test_vllm_external import wait_until

SERVER_SCRIPT = """
import http.server, os, sys, time
port, starts_file, failure = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(starts_file, "a") as file:  # One character per start.
    file.write("x")
if failure == "server hangs" and os.path.getsize(starts_file) == 2:
    time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        if self.path == "/die":
            os._exit(3)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass
class FakeLaunch:
    """Launches `SERVER_SCRIPT`. If ``failure`` is "server hangs" or "no memory", the second start fails."""

    starts_file: Path
    failure: str
    start_count: int = 0

    @property
    def config(self) -> VllmEngineConfig:
        return VllmEngineConfig(start_timeout=3.0)

    def build_command(self, port: int) -> list[str]:
        self.start_count += 1
        if self.failure == "no memory" and self.start_count == 2:
            raise OSError(12, "Cannot allocate memory")
        return [sys.executable, "-I", "-c", SERVER_SCRIPT, str(port), str(self.starts_file), self.failure]

    def build_environment(self, key: str, package: Path) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("failure", ["server hangs", "no memory", "server is busy"])
async def test_process_restarts_again_after_a_failed_restart(failure: str, tmp_path: Path) -> None:
    ready_count = 0

    async def on_ready() -> None:
        nonlocal ready_count
        ready_count += 1
        if failure == "server is busy" and ready_count == 2:
            raise EngineUnavailable("vLLM responded with status 503: busy")

    launch = FakeLaunch(tmp_path / "starts", failure)
    server = VllmProcess(
        cast(VllmLaunch, launch),
        tmp_path / "log",
        ServerCallbacks(on_ready, lambda _: None, lambda _: None),
        restart_delays=(0.05, 0.05, 0.05),
    )
    await server.start()
    try:
        with contextlib.suppress(EngineError):
            await server.client.get("/die")
        await wait_until(lambda: ready_count == (3 if failure == "server is busy" else 2))
        assert launch.start_count == 3
        assert server.failure is None
    finally:
        await server.close()


async def send_request(
    path: str, *headers: tuple[bytes, bytes], scope_type: str = "http"
) -> list[dict[str, Any]] | None:
    """Return the messages that the middleware sends, or None if it forwards the request to the app."""
    sent: list[dict[str, Any]] = []
    forwarded: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        forwarded.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any: ...

    await RequireKeyMiddleware(app)(
        {"type": scope_type, "path": path, "headers": list(headers)}, receive, send
    )
    return None if forwarded else sent


async def test_middleware_requires_the_key_on_all_paths_except_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    protected_paths = [
        "/pause",
        "/resume",
        "/collective_rpc",
        "/update_weights",
        "/v1/models",
        "/health/",
        "/metrics",
    ]
    for path in protected_paths:
        for header in (b"Bearer other", b"Bearer the-ke\xff", b"the-key", b""):
            response = await send_request(path, (b"authorization", header))
            assert response is not None, (path, header)
            assert response[0]["status"] == 401
        assert await send_request(path) is not None
        assert await send_request(path, (b"authorization", b"Bearer the-key")) is None
    assert await send_request("/health") is None
    assert await send_request("", scope_type="lifespan") is None
    (closed,) = await send_request("/v1/realtime", scope_type="websocket") or []
    assert closed["type"] == "websocket.close"


def test_command_uses_a_middleware_without_third_party_imports() -> None:
    command = build_launch(VllmEngineConfig(args=["--middleware", "custom.Middleware"])).build_command(1)
    assert command[command.index("--middleware") + 1] == MIDDLEWARE
    assert command[-1] == "custom.Middleware"
    root = Path(instar.__file__).parents[1]
    program = (
        f"import sys; sys.path.insert(0, {str(root)!r}); before = set(sys.modules)\n"
        "from instar.engines.vllm.auth import RequireKeyMiddleware\n"
        "print({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    completed = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "{'instar'}"
