"""A trainer and the service that it trains at, as processes that can be started, killed and compared."""

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
from tests.torture.nursery import Life, Nursery
from tests.torture.tortured import Trained
from tests.unit.data.builders import RUN, add_group, begin

STEPS = 6
DEADLINE = 60.0
"""Of one call to the service, and of anything that is waited for here."""
NOT_STALE = 1000
"""A version that no group is too old at, in whatever step it is trained."""
GAVE_UP = re.compile(r"^instar\.errors\.Backend(Unavailable|Lost): ", re.M)
"""How a trainer ends that is to be started again."""


@dataclass
class Served:
    """A server, always on the same port, folder and key."""

    protocol: str
    model: Path
    folder: Path
    nursery: Nursery
    session_ttl: float = 60.0

    def __post_init__(self) -> None:
        self.key = f"tml-{secrets.token_urlsafe(32)}"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = self.folder / "server.txt"
        self.kept = self.folder / "checkpoints"

    def start(self) -> None:
        """It may take a moment until it answers."""
        arguments = [self.protocol, str(self.model), str(self.kept), str(self.port), str(self.session_ttl)]
        env = {"INSTAR_PROTOCOL_KEYS": self.key}
        self.nursery.start(Life("tests.torture.service_server:main", arguments, env, str(self.output)))

    @property
    def pid(self) -> int:
        assert self.nursery.pid is not None
        return self.nursery.pid

    def wait(self) -> None:
        """Until it takes connections."""
        until = time.monotonic() + DEADLINE
        while not _is_taken(self.port):
            assert time.monotonic() < until, "the server does not come up"
            time.sleep(0.05)

    def restart(self) -> None:
        """After a kill."""
        assert self.nursery.wait() == -9, self.output.read_text()
        self.start()


def _free_port() -> int:
    """Below those that the system gives to whoever asks for any: it is to be free still when the server comes
    back."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class ServiceRun(Trained):
    """A run in a folder of its own. ``service`` may be `local`: then the trainer computes itself."""

    def __init__(
        self, folder: Path, model: Path, service: str, nursery: Nursery, served: Served | None
    ) -> None:
        super().__init__(folder / "run", STEPS)
        self.folder = folder
        self.nursery = nursery
        self.served = served
        self.output = folder / "trainer.txt"
        config = RunConfig.model_validate(settings(self.run_dir, model, service, served))
        self._file = folder / "run.json"
        self._file.write_bytes(msgspec.json.encode(config.model_dump(mode="json")))
        self._env = {SERVICES[service].key_env: served.key} if served is not None else {}
        asyncio.run(fill(config))

    def start(self, plan: Path | None = None) -> None:
        arguments = [str(self._file), *([] if plan is None else [str(plan)])]
        life = Life("tests.torture.service_trainer:main", arguments, self._env, str(self.output))
        self.nursery.start(life)

    def finish(self) -> None:
        self.wait_until(self.nursery.is_over)
        code = self.nursery.wait()
        assert code == 0, f"exit code {code}\n{self.explain()}"

    def gave_up(self) -> bool:
        """Whether the trainer has ended for want of the service, as it may; its end is noted then."""
        if not self.nursery.is_over():
            return False
        code = self.nursery.wait()
        said = self.output.read_text(errors="replace").rpartition("Traceback")[2]
        assert code in (0, 1), f"exit code {code}\n{self.explain()}"
        assert code == 0 or GAVE_UP.search(said), self.explain()
        return code == 1

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until, f"not within {DEADLINE:g} s\n{self.explain()}"
            time.sleep(0.01)

    def explain(self) -> str:
        parts = [self.output] if self.served is None else [self.output, self.served.output]
        there = [part for part in parts if part.exists()]
        return "\n".join(f"--- {part.name}\n{part.read_text(errors='replace')[-3000:]}" for part in there)

    # --- where the service keeps it --------------------------------------------------------------

    def adapter_at(self, artifact: str) -> Path:
        return Path(artifact) if self.served is None else self._kept(artifact) / "adapter"

    def state_at(self, saved: Path) -> Path:
        if self.served is None:
            return saved
        told: dict[str, Any] = json.loads((saved / "state.json").read_text())
        return self._kept(told["state"] if "state" in told else told["path"]) / "state"

    def _kept(self, path: str) -> Path:
        """Weaver's names for the folders are others."""
        assert self.served is not None
        model, folder, name = path.partition("://")[2].split("/")
        return self.served.kept / model / SERVICE_FOLDERS.get(folder, folder) / name


def settings(run_dir: Path, model: Path, service: str, served: Served | None) -> dict[str, Any]:
    backend: dict[str, Any] = {"type": service}
    if served is None:
        backend |= {"lora": {"rank": 4}, "threads": 1}
    else:
        backend |= {"rank": 4, "base_url": served.url, "deadline": DEADLINE}
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
            "warmup_steps": 0,
            "tensorboard": False,
        },
    }


async def fill(config: RunConfig) -> None:
    """Every group is there from the start, and always the same."""
    store = SqliteStore(config.store_path)
    await begin(store)
    for index in range(STEPS):
        await add_group(store, index, [1.0, 0.0, 0.25 * (index % 3)], version=NOT_STALE)
    await store.close()
