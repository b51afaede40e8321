"""The environment with the Python clients, made once under ``.cache/clients``, and how they are run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.cached_folders import create_folder_once
from tests.integration.backends.environments import install

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CACHE = Path(__file__).parents[3] / ".cache" / "clients"
RUN_TIMEOUT = 100


@dataclass(frozen=True)
class ClientJob:
    """One conversation of a client, as `programs/job.py` reads it."""

    url: str
    key: str
    variant: str
    question: str
    follow_up: str


@dataclass(frozen=True)
class ClientResult:
    answers: list[Any]
    usage: list[tuple[int, int]]
    error: str


def install_clients() -> Path:
    """The clients' interpreter. Another list of requirements is another environment."""
    folder = CACHE / sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    # The list is complete, so there is nothing to resolve.
    create_folder_once(folder, lambda fresh: install(fresh, "--no-deps", "-r", str(REQUIREMENTS)))
    return folder / "bin" / "python"


async def run_client(
    name: str, jobs: Sequence[ClientJob], home: Path, timeout: float = RUN_TIMEOUT
) -> list[ClientResult]:
    """All jobs at once, in one process of ``programs/run_<name>.py``. ``home`` is a folder."""
    python = await asyncio.to_thread(install_clients)
    process = await asyncio.create_subprocess_exec(
        str(python),
        str(HERE / "programs" / f"run_{name}.py"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONWARNINGS": "ignore"},
        cwd=home,
    )
    given = json.dumps([asdict(job) for job in jobs]).encode()
    try:
        out, err = await asyncio.wait_for(process.communicate(given), timeout)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}: {err.decode()[-2000:]}")
    found = json.loads(out.decode().splitlines()[-1])
    return [ClientResult(one["answers"], [(a, b) for a, b in one["usage"]], one["error"]) for one in found]


if __name__ == "__main__":
    print(install_clients())
