"""Install the Python clients in an environment under ``.cache/clients``, and run them."""

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
from tests.integration.backends.environments import create_environment

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CACHE = Path(__file__).parents[3] / ".cache" / "clients"
RUN_TIMEOUT_SECONDS = 100


@dataclass(frozen=True)
class ClientJob:
    """A conversation for a client to hold, in the form that `programs/job.py` reads."""

    url: str
    key: str
    variant: str
    question: str
    follow_up: str


@dataclass(frozen=True)
class ClientResult:
    """The result of a job, with the fields of `JobResult` in `programs/job.py`."""

    answers: list[Any]
    usage: list[tuple[int, int]]
    error: str


def install_clients() -> Path:
    """Install the clients if necessary, and return their interpreter.

    Each version of the requirements has its own environment.
    """
    folder = CACHE / sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    # The requirements include all dependencies, so none need to be resolved.
    create_folder_once(
        folder, lambda new_folder: create_environment(new_folder, "--no-deps", "-r", str(REQUIREMENTS))
    )
    return folder / "bin" / "python"


async def run_client(
    name: str, jobs: Sequence[ClientJob], home: Path, timeout_seconds: float = RUN_TIMEOUT_SECONDS
) -> list[ClientResult]:
    """Run all jobs concurrently in one process of ``programs/run_<name>.py``, with ``home`` as its HOME.

    Raises TimeoutError if the process does not exit in time, and RuntimeError if it fails.
    """
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
    jobs_json = json.dumps([asdict(job) for job in jobs]).encode()
    try:
        stdout, stderr = await asyncio.wait_for(process.communicate(jobs_json), timeout_seconds)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"{name} exited with code {process.returncode}: {stderr.decode()[-2000:]}")
    results = json.loads(stdout.decode().splitlines()[-1])
    return [
        ClientResult(
            result["answers"], [(prompt, sampled) for prompt, sampled in result["usage"]], result["error"]
        )
        for result in results
    ]


if __name__ == "__main__":
    print(install_clients())
