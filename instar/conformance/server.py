"""Runs a protocol server in a separate process, so that a backend can be checked against it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from instar.config import ModelConfig
from instar.errors import InstarError

START_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 20.0
PROTOCOLS = {"tinker": "tinker", "mint": "tinker", "weaver": "weaver"}
"""The protocol of each cloud backend."""


@dataclass
class ServerProcess:
    url: str
    key: str = field(repr=False)
    folder: Path
    """The folder with the server's checkpoints."""
    process: subprocess.Popen[str] = field(repr=False)

    def adapter_folder(self, sampler_path: str) -> Path:
        """Return the folder with the adapter of a published sampler. Both protocols use the same layout."""
        model, _, name = sampler_path.partition("://")[2].split("/")
        return self.folder / model / "sampler_weights" / name / "adapter"


@contextmanager
def run_server(
    protocol: str, model: ModelConfig, folder: Path, *, port: int = 0, threads: int | None = None
) -> Generator[ServerProcess]:
    """Run a server for the duration of the block. It logs to ``folder``/server.log."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "instar.cli.main", "backends", "serve", "--json"]
    command += ["--protocol", protocol, "--model", model.name, "--dtype", model.dtype]
    command += ["--device", model.device, "--context", str(model.context_length)]
    # The limit is high, because some SDKs cannot end a session, so models of finished cases stay loaded.
    command += ["--dir", str(folder / "checkpoints"), "--port", str(port), "--max-models", "64"]
    command += [] if threads is None else ["--threads", str(threads)]
    log = folder / "server.log"
    with log.open("ab") as log_file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log_file, text=True)
    try:
        startup_info = json.loads(_read_first_line(process, log))
        yield ServerProcess(startup_info["url"], startup_info["api_key"], folder / "checkpoints", process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_first_line(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_SECONDS, process.kill)
    watchdog.start()
    try:
        if line := process.stdout.readline():
            return line
    finally:
        watchdog.cancel()
    raise InstarError(f"the protocol server did not start; end of {log}:\n{log.read_text()[-2000:]}")
