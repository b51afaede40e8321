"""The servers that are compared with the peers: the gateway in its two modes, and the floor (floor.py)."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import yaml
from gateway_parts.load import Target
from gateway_parts.processes import (
    MeasurementError,
    find_free_port,
    read_log_tail,
    start_process,
    wait_until_up,
)
from gateway_parts.stub import REPLY

MODEL = "smollm2-135m"
ROW_BYTES = 2048
"""The size of the floor's rows. It holds a complete small request or the new part of a long one."""
SESSIONS = 256


@contextlib.contextmanager
def start_floor(folder: Path, stub_url: str) -> Generator[Target]:
    folder.mkdir(parents=True)
    port, log = find_free_port(), folder / "log"
    script = Path(__file__).with_name("floor.py")
    command = [sys.executable, script, str(port), stub_url, folder / "store.db", str(ROW_BYTES)]
    with start_process(command, log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, url, log)
        sessions = [("/v1/chat/completions", "none")] * SESSIONS
        yield Target("floor", "floor, one durable row", url, sessions, process.pid)


class GatewayProcess:
    """A running gateway of `instar serve` or `instar train`."""

    def __init__(self, announcement: dict[str, str]) -> None:
        self.url = announcement["base_url"].removesuffix("/v1")
        self.admin_key = announcement["admin_key"]
        self.agent_key = announcement.get("api_key", "")  # `instar train` does not announce one
        self.store = Path(announcement["run_dir"]) / "store.db"
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        """Return the pid of the gateway process, as registered in the store."""
        with contextlib.closing(sqlite3.connect(f"{self.store.as_uri()}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT pid FROM endpoints WHERE role = 'gateway'").fetchone()
        if row is None:
            raise MeasurementError(f"the gateway is not registered in {self.store}")
        return int(row[0])

    def count_calls(self) -> int:
        """Return the number of calls in the store."""
        with contextlib.closing(sqlite3.connect(f"{self.store.as_uri()}?mode=ro", uri=True)) as database:
            return int(database.execute("SELECT count(*) FROM calls").fetchone()[0])

    def list_replies(self) -> set[str]:
        """Return the ids of the complete replies in the store."""
        with contextlib.closing(sqlite3.connect(f"{self.store.as_uri()}?mode=ro", uri=True)) as database:
            return {row[0] for row in database.execute("SELECT request_id FROM calls WHERE status = 'ok'")}

    def post(self, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.admin_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def stats(self) -> dict[str, float]:
        request = urllib.request.Request(
            f"{self.url}/stats", headers={"Authorization": f"Bearer {self.admin_key}"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def make_target(self, name: str) -> Target:
        """Open SESSIONS sessions and return them as a load target."""
        sessions = [("/v1/chat/completions", self.post("/sessions", {})["api_key"]) for _ in range(SESSIONS)]
        return Target(name, f"Instar, {name}", self.url, sessions, self.pid, has_sessions=True)


@contextlib.contextmanager
def start_gateway(
    folder: Path, engine: dict[str, Any], *, max_context: int = 200_000, **limits: Any
) -> Generator[GatewayProcess]:
    """Run a gateway. ``limits`` are settings in the `gateway` section of its config."""
    folder.mkdir(parents=True)
    settings = {
        "name": "bench",
        "dir": str(folder / "run"),
        "model": {"name": MODEL, "max_context": max_context},
        "engine": engine,
        "gateway": {"max_in_flight": 1024, **limits},
    }
    config_path, log = folder / "run.yaml", folder / "log"
    config_path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "instar.cli.main", "serve", config_path, "--json"]
    with start_process(command, log=log, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait(10)
            raise MeasurementError(f"instar serve exited unexpectedly: {read_log_tail(log)}")
        yield GatewayProcess(json.loads(line))


def make_proxy_engine(stub_url: str) -> dict[str, Any]:
    return {"type": "upstream", "base_url": stub_url, "dialect": "chat"}


def make_exact_engine() -> dict[str, Any]:
    return {"type": "scripted", "replies": [REPLY]}
