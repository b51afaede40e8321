"""`instar backends serve` and `instar train`, as a user starts them."""

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
from tests.integration.backends.environments import ROOT, interpreter
from tests.torture.run_process import RunProcess

PROTOCOLS = {"tinker": "tinker", "mint": "tinker", "weaver": "weaver"}
INSTAR = (sys.executable, "-m", "instar.cli.main")
START_SECONDS = 120
STOP_SECONDS = 30
TRAIN_SECONDS = 300


@dataclass(frozen=True)
class Service:
    """A served protocol, and how a run is told of it."""

    name: str
    url: str
    key: str

    @property
    def environment(self) -> dict[str, str]:
        service = SERVICES[self.name]
        return {service.key_env: self.key, service.url_env: self.url}

    def backend(self, rank: int) -> dict[str, Any]:
        """The section of a run's settings."""
        python = {"python": str(interpreter("mint"))} if self.name == "mint" else {}
        return {"type": self.name, "rank": rank, **python}


@contextmanager
def serving(name: str, model: str, folder: Path, *options: str) -> Generator[Service]:
    command = [*INSTAR, "backends", "serve", "--json", "--protocol", PROTOCOLS[name], "--model", model]
    command += ["--dir", str(folder / "served"), *options]
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)
    late = threading.Timer(START_SECONDS, server.kill)
    late.start()
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        late.cancel()
        assert line, (folder / "serve.log").read_text()
        reported = json.loads(line)
        yield Service(name, reported["url"], reported["api_key"])
    finally:
        late.cancel()
        server.terminate()
        assert server.wait(STOP_SECONDS) == 0, (folder / "serve.log").read_text()
        assert server.stdout is not None
        server.stdout.close()


def train(settings: dict[str, Any], folder: Path, service: Service | None = None) -> list[dict[str, Any]]:
    """The record of every step of a run that ended well."""
    folder.mkdir(exist_ok=True)
    run = RunProcess(folder, {**settings, "dir": str(folder / "run")})
    run.start(**(service.environment if service else {}))
    try:
        run.finish(TRAIN_SECONDS)
    finally:
        if not run.has_exited():
            run.kill()
    assert service is None or service.key not in run.explain()
    return read_steps(run.run_dir)
