"""Start a training run for the soak test and measure the resources of its processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from gateway_parts.processes import (
    MeasurementError,
    check_running,
    read_log_tail,
    read_usage,
    start_process,
    wait_until_up,
)
from gateway_parts.servers import GatewayProcess

BENCH = Path(__file__).resolve().parent.parent
PROGRAM = "instar train"
MAX_IN_FLIGHT = 64
START_TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True)
class Resources:
    rss_mb: float
    fds: int


def make_settings(folder: Path, model: Path) -> dict[str, Any]:
    """Return the settings of a run that trains a tiny model on the replies of two scripted engines."""
    module = "reliability_parts.workload"
    return {
        "name": "soak",
        "dir": str(folder / "run"),
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu"},
        "engine": {"type": "scripted", "function": f"{module}:reply", "delay": 0.01, "count": 2},
        "gateway": {"max_in_flight": MAX_IN_FLIGHT, "idle_timeout": 60},
        "backend": {"type": "local", "threads": 1, "lora": {"rank": 4}},
        "trainer": {
            "steps": 1_000_000,
            "groups_per_step": 2,
            "max_staleness": 4,
            "warmup_steps": 0,
            "tensorboard": False,
        },
        "rollout": {
            "tasks": {"type": "python", "function": f"{module}:make_tasks"},
            "agent": {"type": "function", "function": f"{module}:agent"},
            "group_size": 4,
            "concurrency": 8,
            "timeout": 60,
        },
        "reward": {"type": "rule", "function": f"{module}:rule"},
    }


class SoakRun:
    """A running `instar train` and its gateway."""

    def __init__(self, gateway: GatewayProcess, supervisor: subprocess.Popen[bytes], log_path: Path) -> None:
        self.gateway = gateway
        self._supervisor = supervisor
        self._log_path = log_path

    def check_running(self) -> None:
        """Raise MeasurementError if the run has exited."""
        check_running(self._supervisor, self._log_path, PROGRAM)

    def query(self, sql: str) -> list[Any]:
        return query_store(self.gateway.store_path, sql)

    def read_pids(self) -> dict[str, int]:
        """Return the pids of the run's processes by name."""
        return {"supervisor": self._supervisor.pid, **dict(self.query("SELECT name, pid FROM endpoints"))}

    def measure_resources(self) -> dict[str, Resources]:
        """Return the resources of each process by name, except those that are being restarted."""
        resources: dict[str, Resources] = {}
        for name, pid in self.read_pids().items():
            with contextlib.suppress(OSError):
                fds = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - called often, and only counts
                resources[name] = Resources(read_usage(pid).rss_mb, fds)
        return resources

    def count_published_versions(self) -> int:
        return int(self.query("SELECT count(*) FROM policies WHERE state = 'published'")[0][0])

    def count_rewards(self) -> int:
        return int(self.query("SELECT count(*) FROM rewards")[0][0])


def query_store(store_path: Path, sql: str) -> list[Any]:
    uri = f"{store_path.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=10)) as database:
        return database.execute(sql).fetchall()


@contextlib.contextmanager
def start_run(folder: Path, model: Path) -> Generator[SoakRun]:
    """Run `instar train` until the context ends. Yield when its trainer and its gateway are ready.

    Raises MeasurementError if the run exits or does not start in time.
    """
    config_path, log_path = folder / "run.yaml", folder / "log"
    settings = make_settings(folder, model)
    config_path.write_text(yaml.safe_dump(settings))
    admin_key = f"sk-instar-{secrets.token_urlsafe(32)}"
    environment = {
        "INSTAR_ADMIN_KEY": admin_key,
        "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "instar.cli.main", "train", config_path, "--json"]
    with start_process(command, log_path, env=environment) as process:
        run_dir = Path(settings["dir"])
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while (url := find_gateway_url(run_dir / "store.db")) is None:
            check_running(process, log_path, PROGRAM)
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"the run did not start within {START_TIMEOUT_SECONDS:.0f} s: {read_log_tail(log_path)}"
                )
            time.sleep(0.1)
        wait_until_up(process, f"{url}/healthz", log_path)
        connection_info = {"base_url": f"{url}/v1", "admin_key": admin_key, "run_dir": str(run_dir)}
        yield SoakRun(GatewayProcess(connection_info), process, log_path)


def find_gateway_url(store_path: Path) -> str | None:
    """Return the URL of the run's gateway, or None if the trainer is not waiting for data or training yet."""
    if not store_path.is_file():
        return None
    try:
        rows = query_store(store_path, "SELECT role, url, doing FROM endpoints")
    except sqlite3.OperationalError:  # the tables do not exist yet
        return None
    is_ready = any(role == "trainer" and doing.startswith(("waiting", "step")) for role, _, doing in rows)
    return next((url for role, url, _ in rows if role == "gateway" and is_ready), None)
