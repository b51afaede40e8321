"""The sandboxes that work on this machine, and helpers that run code and find leftover processes."""

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
def find_sandbox_problem(kind: str) -> str | None:
    """Return the reason why the sandbox does not work on this machine, or None if it works."""
    try:
        asyncio.run(create_sandbox(kind))
    except ConfigError as error:
        return str(error)
    return None


def list_sandbox_params() -> list[object]:
    """Return the sandboxes as pytest parameters. Those that do not work on this machine are skipped."""
    return [
        pytest.param(
            kind,
            marks=pytest.mark.skipif(
                find_sandbox_problem(kind) is not None, reason=str(find_sandbox_problem(kind))
            ),
        )
        for kind in KINDS
    ]


async def run_code(sandbox: Sandbox, code: str, *arguments: str, **limits: float) -> SandboxResult:
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
