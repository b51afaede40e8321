"""The interface for sandboxes, which run untrusted programs within limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Literal

SandboxLimitName = Literal["time", "memory", "processes", "output", "files"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits for all processes of a job together. ``memory_mb`` also limits the address space of each
    process, and ``processes`` also counts threads. Network access is disabled unless ``network`` is True."""

    seconds: float = 10.0
    memory_mb: int = 1024
    processes: int = 64
    output_kb: int = 1024
    files_mb: int = 64
    max_files: int = 10_000
    network: bool = False


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """A command that runs in its own temporary folder."""

    command: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Contents of the files to create in the job's folder, by name. All files are executable."""
    file_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps environment variables to names in ``files``. Each variable is set to the file's full path."""
    readable_paths: Sequence[Path] = ()
    """Paths that the job may read in addition to system folders and this Python installation."""
    channel: socket | None = None
    """A socket that the job inherits as the same file descriptor. Closed here once the job starts."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    exit_code: int
    """127 if the command cannot be executed, 128 + n if it was killed by signal n."""
    output: str
    exceeded_limit: SandboxLimitName | None
    reason: str
    """Why the job failed, for example `ran longer than 10 s`. Empty if it succeeded."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.exceeded_limit is None


class Sandbox(ABC):
    """Runs untrusted programs (jobs) in isolation. Several jobs may run concurrently. All processes of a job
    have exited when ``run`` returns or is cancelled."""

    name: str

    @abstractmethod
    async def run(self, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
        """Run the job and return its result. Raises ScoreError if the sandbox itself fails."""
