"""The sandboxes available on this machine, and helpers that find what a job left behind."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from instar.errors import ConfigError
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult
from instar.rewards.sandbox.factory import create_sandbox

KINDS = ("bubblewrap", "landlock")


@functools.cache
def sandbox_problem(kind: str) -> str | None:
    try:
        asyncio.run(create_sandbox(kind))
    except ConfigError as error:
        return str(error)
    return None


def available_sandboxes() -> list[object]:
    """Return pytest parameters, with a skip mark for sandboxes that do not work on this machine."""
    return [
        pytest.param(
            kind,
            marks=pytest.mark.skipif(sandbox_problem(kind) is not None, reason=str(sandbox_problem(kind))),
        )
        for kind in KINDS
    ]


async def run(sandbox: Sandbox, code: str, *arguments: str, **limits: float) -> SandboxResult:
    settings = SandboxLimits(**{"seconds": 20.0, **limits})  # pyright: ignore[reportArgumentType]
    return await sandbox.run(SandboxJob([sys.executable, "-c", code, *arguments]), settings)


def find_processes(marker: str) -> list[int]:
    """Return the ids of processes whose arguments contain the marker."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if marker.encode() in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
    return pids


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
