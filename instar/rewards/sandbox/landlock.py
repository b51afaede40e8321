"""A sandbox that needs no namespace: Landlock for files, seccomp for the network and everything else.

The job shares the machine's process numbers and may see that a file is there, but can open none besides
those it may read and its own folder, nor signal, trace or change anything else. Its folder is on the disk.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from instar.errors import ConfigError
from instar.rewards.sandbox import seccomp
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult
from instar.rewards.sandbox.supervise import (
    LAUNCHER,
    SandboxLaunch,
    list_readable_paths,
    pick_unused_uid,
    supervise,
)

MIN_ABI = 3
"""From this on it watches truncation, too (Linux 6.2)."""
SCOPES_SIGNALS = 6
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class LandlockSandbox(Sandbox):
    name = "landlock"

    def __init__(self) -> None:
        self.abi = landlock_abi()
        if self.abi == 0:
            raise ConfigError("this kernel has no Landlock, or it is not switched on")
        if self.abi < MIN_ABI:
            raise ConfigError(f"this kernel's Landlock is of version {self.abi}; {MIN_ABI} is needed (6.2)")
        if not seccomp.is_supported():
            raise ConfigError(f"no seccomp filter is known for {os.uname().machine}")

    async def run(self, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
        uid = pick_unused_uid()
        folder = Path(tempfile.mkdtemp(prefix="instar-job-"))
        try:
            temporary = folder / "tmp"
            temporary.mkdir()
            if uid is not None:
                for path in (folder, temporary):
                    os.chown(path, uid, uid)
            return await supervise(self._launch(job, limits, folder, uid), job, limits)
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def _launch(self, job: SandboxJob, limits: SandboxLimits, folder: Path, uid: int | None) -> SandboxLaunch:
        families = (seccomp.AF_INET, seccomp.AF_INET6, seccomp.AF_NETLINK) if limits.network else ()
        return SandboxLaunch(
            command_prefix=[],
            launcher_path=str(LAUNCHER),
            folder=str(folder),
            temporary=str(folder / "tmp"),
            seccomp=seccomp.build_filter(
                families, shares_host_processes=True, allow_signals=self.abi >= SCOPES_SIGNALS
            ),
            uid=uid,
            landlock={
                "abi": self.abi,
                "read": [str(path) for path in list_readable_paths(job, limits)],
                "write": [str(folder)],
                "devices": list(DEVICES),
            },
            kill_job=_kill,
            measure_files=lambda processes: _usage(folder, processes),
        )


def landlock_abi() -> int:
    """Its version here; 0 where there is none."""
    version = ctypes.CDLL(None, use_errno=True).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, version)


def _kill(root: int) -> None:
    """The launcher ends the job's process group, which nothing can leave."""
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGTERM)


def _usage(folder: Path, processes: list[int]) -> tuple[int, int]:
    """Also of files that are deleted but open."""
    size = number = 0
    for place, _, names in os.walk(folder):
        number += len(names) + 1
        for name in names:
            with suppress(OSError):
                size += os.lstat(f"{place}/{name}").st_blocks * 512
    for pid in processes:
        with suppress(OSError):  # it is gone
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found = entry.stat()
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        size += found.st_blocks * 512
    return size, number
