"""A trainer and its training service, in processes that tests can start and kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from instar.clouds.base import SERVICES
from instar.config import RunConfig
from instar.protocol.weaver.checkpoints import SERVICE_FOLDERS
from instar.store.sqlite import SqliteStore
from tests.torture.fork_server import ChildSpec, ForkServer
from tests.torture.run_process import StoredRun
from tests.unit.data.builders import RUN, add_group, put_test_run

STEPS = 6
TIMEOUT_SECONDS = 60.0
"""The time allowed for one call to the service, and for each wait in this module."""
NEVER_STALE_VERSION = 1000
"""A policy version so high that no group is ever too stale."""
SERVICE_ERROR = re.compile(r"^instar\.errors\.Backend(Unavailable|Lost): ", re.M)
"""Matches the errors with which a trainer exits after the service was killed. Tests then restart it."""


@dataclass
class ServiceProcess:
    """A server process that keeps its port, folder and key across restarts."""

    protocol: str
    model: Path
    folder: Path
    fork_server: ForkServer
    session_ttl_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.key = f"tml-{secrets.token_urlsafe(32)}"
        self.port = _find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = self.folder / "server.txt"
        self.checkpoints_folder = self.folder / "checkpoints"

    def start(self) -> None:
        """Start the process, but do not wait until it accepts connections."""
        arguments = [
            self.protocol,
            str(self.model),
            str(self.checkpoints_folder),
            str(self.port),
            str(self.session_ttl_seconds),
        ]
        env = {"INSTAR_PROTOCOL_KEYS": self.key}
        self.fork_server.start(
            ChildSpec("tests.torture.service_server:main", arguments, env, str(self.output))
        )

    @property
    def pid(self) -> int:
        assert self.fork_server.pid is not None
        return self.fork_server.pid

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not _is_listening(self.port):
            assert time.monotonic() < deadline, (
                f"the server accepted no connection within {TIMEOUT_SECONDS:g} s"
            )
            time.sleep(0.05)

    def restart(self) -> None:
        """Start the server again after it has been killed."""
        assert self.fork_server.wait() == -9, self.output.read_text()
        self.start()


def _find_free_port() -> int:
    """Return a port below the ephemeral range, so that no client takes it before the server restarts."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class ServiceRun(StoredRun):
    """A training run in its own folder. With the service `local`, it needs no server."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        service: str,
        fork_server: ForkServer,
        service_process: ServiceProcess | None,
    ) -> None:
        super().__init__(folder / "run", STEPS)
        self.folder = folder
        self.fork_server = fork_server
        self.service_process = service_process
        self.output = folder / "trainer.txt"
        config = RunConfig.model_validate(make_config(self.run_dir, model, service, service_process))
        self._config_path = folder / "run.json"
        self._config_path.write_bytes(msgspec.json.encode(config.model_dump(mode="json")))
        self._env = {SERVICES[service].key_env: service_process.key} if service_process is not None else {}
        asyncio.run(add_groups(config))

    def start(self, plan_folder: Path | None = None) -> None:
        """Start the trainer, with the kill plan in ``plan_folder`` if there is one."""
        arguments = [str(self._config_path), *([] if plan_folder is None else [str(plan_folder)])]
        spec = ChildSpec("tests.torture.service_trainer:main", arguments, self._env, str(self.output))
        self.fork_server.start(spec)

    def finish(self) -> None:
        """Wait for the trainer to exit, and check that it succeeded."""
        self.wait_until(self.fork_server.has_exited)
        code = self.fork_server.wait()
        assert code == 0, f"exit code {code}\n{self.collect_logs()}"

    def reap_trainer(self) -> bool:
        """Reap the exited trainer. Return True if it failed because the service was killed."""
        code = self.fork_server.wait()
        last_traceback = self.output.read_text(errors="replace").rpartition("Traceback")[2]
        assert code in (0, 1), f"exit code {code}\n{self.collect_logs()}"
        assert code == 0 or SERVICE_ERROR.search(last_traceback), self.collect_logs()
        return code == 1

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, (
                f"condition not met within {TIMEOUT_SECONDS:g} s\n{self.collect_logs()}"
            )
            time.sleep(0.01)

    def collect_logs(self) -> str:
        logs = [self.output] if self.service_process is None else [self.output, self.service_process.output]
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists()
        )

    def resolve_adapter_folder(self, artifact: str) -> Path:
        return (
            Path(artifact)
            if self.service_process is None
            else self._resolve_checkpoint_folder(artifact) / "adapter"
        )

    def resolve_state_folder(self, saved: Path) -> Path:
        if self.service_process is None:
            return saved
        saved_state: dict[str, Any] = json.loads((saved / "state.json").read_text())
        return (
            self._resolve_checkpoint_folder(
                saved_state["state"] if "state" in saved_state else saved_state["path"]
            )
            / "state"
        )

    def _resolve_checkpoint_folder(self, path: str) -> Path:
        """Return the server's folder for a checkpoint path. Weaver's paths use other subfolder names."""
        assert self.service_process is not None
        model, folder, name = path.partition("://")[2].split("/")
        return self.service_process.checkpoints_folder / model / SERVICE_FOLDERS.get(folder, folder) / name


def make_config(
    run_dir: Path, model: Path, service: str, service_process: ServiceProcess | None
) -> dict[str, Any]:
    backend: dict[str, Any] = {"type": service}
    if service_process is None:
        backend |= {"lora": {"rank": 4}, "threads": 1}
    else:
        backend |= {"rank": 4, "base_url": service_process.url, "deadline": TIMEOUT_SECONDS}
    return {
        "name": RUN,
        "dir": str(run_dir),
        "seed": 11,
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu", "max_context": 256},
        "engine": {"type": "scripted"},
        "backend": backend,
        "trainer": {
            "mode": "sync",
            "steps": STEPS,
            "groups_per_step": 1,
            "adam": {"lr": 1e-2},
            "loss": {"name": "importance_sampling"},
            "tensorboard": False,
        },
    }


async def add_groups(config: RunConfig) -> None:
    """Add the groups of all steps to the store. They are the same in every run."""
    store = SqliteStore(config.store_path)
    await put_test_run(store)
    for index in range(STEPS):
        await add_group(store, index, [1.0, 0.0, 0.25 * (index % 3)], version=NEVER_STALE_VERSION)
    await store.close()
