"""Start real vLLM servers on a CPU, through an engine or as a user would."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from instar.config import ModelConfig, RunConfig, VllmEngineConfig
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.engines.server import create_engine_app
from instar.subprocess_guard import guard_command
from tests.integration.backends.environments import get_interpreter
from tests.tiny import make_tiny_model

T = TypeVar("T")
START_TIMEOUT_SECONDS = 600.0
TOKEN = "engine-token"
KEY = "server-key"
ENGINE_PROCESS_NAME = "VLLM::EngineCor"
"""The name of vLLM's engine process, which Linux truncates to 15 characters."""


def make_vllm_model(folder: Path) -> Path:
    """Create the tiny model with a head size that vLLM's attention supports."""
    return make_tiny_model(folder, hidden=128, heads=4, kv_heads=2, context=4096)


def make_model_config(folder: Path, max_context: int = 256) -> ModelConfig:
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=max_context)


def make_vllm_config(**settings: Any) -> VllmEngineConfig:
    values: dict[str, Any] = {"python": str(get_interpreter("vllm")), "kv_gib": 0.1, **settings}
    return VllmEngineConfig(**values)


class ServedEngine:
    """Serves an engine over HTTP, in the event loop of a separate thread, for tests with RemoteEngine."""

    def __init__(self, config: RunConfig, log_path: Path) -> None:
        self.reports: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: Engine = self.run_in_loop(self._start_engine(config, log_path))
        self._listener = socket.create_server(("127.0.0.1", 0))
        app = create_engine_app(self.engine, TOKEN)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
        self._server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        self._serve_future = asyncio.run_coroutine_threadsafe(
            self._server.serve([self._listener]), self._loop
        )
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def _start_engine(self, config: RunConfig, log_path: Path) -> Engine:
        engine = create_engine(config)
        await engine.start(log_path, self.reports.append)
        return engine

    def run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the engine's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_TIMEOUT_SECONDS)

    def close(self) -> None:
        self._server.should_exit = True
        self._serve_future.result(30)
        self.run_in_loop(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()


@contextmanager
def run_vllm_server(model: Path, log_path: Path, *arguments: str) -> Iterator[str]:
    """Run a vLLM server as a user would start it, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    command = [str(get_interpreter("vllm")), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"]
    command += ["--max-model-len", "256", "--kv-cache-memory-bytes", "100000000", *arguments]
    env = {
        **os.environ,
        "VLLM_API_KEY": KEY,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            guard_command(command),
            env=env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log_path)
        yield f"http://127.0.0.1:{port}"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log_path.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    raise TimeoutError(log_path.read_text()[-3000:])
