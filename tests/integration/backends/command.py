"""Run `instar backends serve` and `instar train` as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.clouds.base import SERVICES
from instar.trainer.monitor import read_steps
from tests.integration.backends.environments import ROOT, get_interpreter
from tests.torture.run_process import RunProcess

PROTOCOLS = {"tinker": "tinker", "mint": "tinker", "weaver": "weaver"}
"""The protocol of each service."""
INSTAR = (sys.executable, "-m", "instar.cli.main")
START_TIMEOUT_SECONDS = 120
STOP_TIMEOUT_SECONDS = 30
TRAIN_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class RunningService:
    """A running `instar backends serve` that replaces a training service, and the settings to use it."""

    name: str
    url: str
    key: str

    @property
    def environment(self) -> dict[str, str]:
        service = SERVICES[self.name]
        return {service.key_env: self.key, service.url_env: self.url}

    def make_backend_section(self, rank: int) -> dict[str, Any]:
        """Return the `backend` section of a run's config."""
        python = {"python": str(get_interpreter("mint"))} if self.name == "mint" else {}
        return {"type": self.name, "rank": rank, **python}


@contextmanager
def run_server(name: str, model: str, folder: Path, *options: str) -> Generator[RunningService]:
    """Run `instar backends serve` in place of the named service.

    Checks that it starts in time and that it exits with status 0 when it is terminated.
    """
    command = [*INSTAR, "backends", "serve", "--json", "--protocol", PROTOCOLS[name], "--model", model]
    command += ["--dir", str(folder / "served"), *options]
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)
    start_timer = threading.Timer(START_TIMEOUT_SECONDS, server.kill)
    start_timer.start()
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        start_timer.cancel()
        assert line, (folder / "serve.log").read_text()
        connection_info = json.loads(line)
        yield RunningService(name, connection_info["url"], connection_info["api_key"])
    finally:
        start_timer.cancel()
        server.terminate()
        assert server.wait(STOP_TIMEOUT_SECONDS) == 0, (folder / "serve.log").read_text()
        assert server.stdout is not None
        server.stdout.close()


def run_training(
    settings: dict[str, Any], folder: Path, service: RunningService | None = None
) -> list[dict[str, Any]]:
    """Run `instar train` to completion and return the metrics of every step.

    The service's key must not be in the run's output.
    """
    folder.mkdir(exist_ok=True)
    run = RunProcess(folder, {**settings, "dir": str(folder / "run")})
    run.start(**(service.environment if service else {}))
    try:
        run.finish(TRAIN_TIMEOUT_SECONDS)
    finally:
        if not run.has_exited():
            run.kill()
    assert service is None or service.key not in run.collect_logs()
    return read_steps(run.run_dir)
