"""Start the gateway and the floor (floor.py)."""

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
"""The size of the floor's rows: enough for a complete small request or for the new part of a large one."""
SESSION_COUNT = 256


@contextlib.contextmanager
def start_floor(folder: Path, stub_url: str) -> Generator[Target]:
    folder.mkdir(parents=True)
    port, log_path = find_free_port(), folder / "log"
    script = Path(__file__).with_name("floor.py")
    command = [sys.executable, script, str(port), stub_url, folder / "store.db", str(ROW_BYTES)]
    with start_process(command, log_path) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, url, log_path)
        sessions = [("/v1/chat/completions", "none")] * SESSION_COUNT
        yield Target("floor", "floor, one durable row", url, sessions, process.pid)


class GatewayProcess:
    """A running gateway that `instar serve` or `instar train` has started."""

    def __init__(self, connection_info: dict[str, str]) -> None:
        """``connection_info`` has the fields that `instar serve --json` prints."""
        self.url = connection_info["base_url"].removesuffix("/v1")
        self.admin_key = connection_info["admin_key"]
        self.agent_key = connection_info.get("api_key", "")  # not passed for `instar train`
        self.store_path = Path(connection_info["run_dir"]) / "store.db"
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        """Return the pid of the gateway process, as registered in the store."""
        with contextlib.closing(self._open_store()) as database:
            row = database.execute("SELECT pid FROM endpoints WHERE role = 'gateway'").fetchone()
        if row is None:
            raise MeasurementError(f"the gateway is not registered in {self.store_path}")
        return int(row[0])

    def _open_store(self) -> sqlite3.Connection:
        return sqlite3.connect(f"{self.store_path.as_uri()}?mode=ro", uri=True)

    def count_calls(self) -> int:
        """Return the number of calls in the store."""
        with contextlib.closing(self._open_store()) as database:
            return int(database.execute("SELECT count(*) FROM calls").fetchone()[0])

    def read_reply_ids(self) -> set[str]:
        """Return the ids of the complete replies in the store."""
        with contextlib.closing(self._open_store()) as database:
            return {row[0] for row in database.execute("SELECT request_id FROM calls WHERE status = 'ok'")}

    def post(self, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.admin_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def fetch_stats(self) -> dict[str, float]:
        request = urllib.request.Request(
            f"{self.url}/stats", headers={"Authorization": f"Bearer {self.admin_key}"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def open_target(self, name: str) -> Target:
        """Open SESSION_COUNT sessions and return a load target that uses them."""
        keys = [self.post("/sessions", {})["api_key"] for _ in range(SESSION_COUNT)]
        sessions = [("/v1/chat/completions", key) for key in keys]
        return Target(name, f"Instar, {name}", self.url, sessions, self.pid, extends_calls=True)


@contextlib.contextmanager
def start_gateway(
    folder: Path, engine: dict[str, Any], *, max_context: int = 200_000, **gateway_settings: Any
) -> Generator[GatewayProcess]:
    """Run `instar serve`. ``gateway_settings`` are added to the `gateway` section of its config.

    Raises MeasurementError if it exits before the gateway is ready.
    """
    folder.mkdir(parents=True)
    settings = {
        "name": "bench",
        "dir": str(folder / "run"),
        "model": {"name": MODEL, "max_context": max_context},
        "engine": engine,
        "gateway": {"max_in_flight": 1024, **gateway_settings},
    }
    config_path, log_path = folder / "run.yaml", folder / "log"
    config_path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "instar.cli.main", "serve", config_path, "--json"]
    with start_process(command, log_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait(10)
            raise MeasurementError(f"instar serve exited unexpectedly: {read_log_tail(log_path)}")
        yield GatewayProcess(json.loads(line))


def make_proxy_engine(stub_url: str) -> dict[str, Any]:
    return {"type": "upstream", "base_url": stub_url, "dialect": "chat"}


def make_exact_engine() -> dict[str, Any]:
    return {"type": "scripted", "replies": [REPLY]}
