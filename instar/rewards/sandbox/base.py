"""What runs a program that nobody has read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SandboxLimitName = Literal["time", "memory", "processes", "output", "files"]
LIMIT_MESSAGES: dict[SandboxLimitName, str] = {
    "time": "it ran past its {seconds:g} s",
    "memory": "it took more than {memory_mb} MB of memory",
    "processes": "it had more than {processes} processes",
    "output": "it wrote more than {output_kb} KB of output",
    "files": "its files took more than {files_mb} MB, or were more than {files}",
}


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Of one job: all its processes together, but for ``memory_mb``, which also bounds each one's address
    space."""

    seconds: float = 10.0
    memory_mb: int = 1024
    processes: int = 64
    """Threads count."""
    output_kb: int = 1024
    files_mb: int = 64
    files: int = 10_000
    network: bool = False


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """A command, run in a folder of its own that is gone afterwards."""

    command: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Put into the folder, by name; each may be run."""
    file_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that hold the full path of one of the files."""
    readable_paths: Sequence[Path] = ()
    """What else it may read of this machine, besides the system's folders and this Python."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    exit_code: int
    """127: there is no such command. 128 + n: ended by signal n."""
    output: str
    """stdout and stderr together."""
    exceeded_limit: SandboxLimitName | None
    """Which limit ended it."""
    reason: str
    """Why it failed, in words; empty when it did not."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.exceeded_limit is None


class Sandbox(ABC):
    """``run`` may be called many times at once. When it returns, or is cancelled, no process is left."""

    name: str

    @abstractmethod
    async def run(self, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
        """Raises ScoreError when the sandbox itself failed."""
