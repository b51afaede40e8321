"""A vLLM server as a child: started again when it dies, however often that takes; open to who has the key."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from instar.config import VllmEngineConfig
from instar.engines.vllm import process as module
from instar.engines.vllm.auth import RequireKeyMiddleware
from instar.engines.vllm.command import MIDDLEWARE, VllmLaunch
from instar.engines.vllm.process import VllmProcess
from instar.errors import EngineError, EngineUnavailable
from tests.unit.engines.test_vllm import launch
from tests.unit.engines.test_vllm_external import until

SERVER = """
import http.server, os, sys, time
port, mark, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if os.path.exists(mark) and open(mark).read() == "1" and how == "hangs":
    open(mark, "w").write("2")
    time.sleep(60)
open(mark, "a").write("1")
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
class PretendLaunch:
    mark: Path
    how: str
    starts: int = 0

    @property
    def config(self) -> VllmEngineConfig:
        return VllmEngineConfig(start_timeout=3.0)

    def command(self, port: int) -> list[str]:
        self.starts += 1
        if self.how == "cannot" and self.starts == 2:
            raise OSError(12, "Cannot allocate memory")
        return [sys.executable, "-I", "-c", SERVER, str(port), str(self.mark), self.how]

    def environment(self, key: str, package: Path) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("how", ["hangs", "cannot", "refuses"])
async def test_a_restart_that_fails_is_followed_by_another(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF", (0.05, 0.05, 0.05))
    ups: list[int] = []

    async def up() -> None:
        ups.append(1)
        if how == "refuses" and len(ups) == 2:
            raise EngineUnavailable("vLLM answered 503: busy")

    pretended = PretendLaunch(tmp_path / "mark", how)
    child = VllmProcess(
        cast(VllmLaunch, pretended), tmp_path / "log", up=up, down=lambda _: None, say=lambda _: None
    )
    await child.start()
    try:
        with contextlib.suppress(EngineError):
            await child.client.get("/die")
        served: Callable[[], bool] = lambda: len(ups) == (3 if how == "refuses" else 2)  # noqa: E731
        await until(served)
        assert pretended.starts == 3
        assert child.failure is None
    finally:
        await child.close()


# --- the key ----------------------------------------------------------------------------------------


async def reached(
    path: str, *headers: tuple[bytes, bytes], kind: str = "http"
) -> list[dict[str, Any]] | None:
    """None: it is let through; else what is answered in its place."""
    sent: list[dict[str, Any]] = []
    through: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        through.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any: ...

    await RequireKeyMiddleware(app)({"type": kind, "path": path, "headers": list(headers)}, receive, send)
    return None if through else sent


async def test_a_server_asks_for_the_key_on_all_paths_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    guarded = [
        "/pause",
        "/resume",
        "/collective_rpc",
        "/update_weights",
        "/v1/models",
        "/health/",
        "/metrics",
    ]
    for path in guarded:
        for header in (b"Bearer other", b"Bearer the-ke\xff", b"the-key", b""):
            answer = await reached(path, (b"authorization", header))
            assert answer is not None, (path, header)
            assert answer[0]["status"] == 401
        assert await reached(path) is not None
        assert await reached(path, (b"authorization", b"Bearer the-key")) is None
    assert await reached("/health") is None
    assert await reached("", kind="lifespan") is None
    (closed,) = await reached("/v1/realtime", kind="websocket") or []
    assert closed["type"] == "websocket.close"


def test_a_server_is_started_with_the_guard_which_needs_only_python() -> None:
    command = launch(VllmEngineConfig(args=["--middleware", "of.the.User"])).command(1)
    assert command[command.index("--middleware") + 1] == MIDDLEWARE
    assert command[-1] == "of.the.User"
    root = Path(module.__file__).parents[3]
    program = (
        f"import sys; sys.path.insert(0, {str(root)!r}); before = set(sys.modules)\n"
        "from instar.engines.vllm.auth import RequireKeyMiddleware\n"
        "print({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    told = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "{'instar'}"
