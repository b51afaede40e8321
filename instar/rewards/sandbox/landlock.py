"""A sandbox without namespaces: Landlock restricts files, and seccomp the network and other system calls.
A job sees the machine's process ids and can tell whether a file exists. It can write only to its own folder,
which is on disk, and read only allowed files. It cannot signal or trace other processes."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from instar.async_utils import run_to_completion
from instar.errors import ConfigError
from instar.rewards.sandbox import launcher, seccomp, supervise
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult

MIN_ABI = 3
"""The first Landlock ABI that restricts truncation (Linux 6.2)."""
FOLDER_PREFIX = "instar-job-"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class LandlockSandbox(Sandbox):
    name = "landlock"

    def __init__(self) -> None:
        self.abi = get_landlock_abi()
        if self.abi == 0:
            raise ConfigError(
                "Landlock is not available; use Linux 6.2 or newer, with `landlock` in the `lsm=` boot "
                "parameter"
            )
        if self.abi < MIN_ABI:
            raise ConfigError(
                f"Landlock ABI {MIN_ABI} is required (Linux 6.2 or newer), but this kernel has ABI {self.abi}"
            )
        seccomp.check_supported()

    async def run(self, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
        allowed_families = (seccomp.AF_INET, seccomp.AF_INET6, seccomp.AF_NETLINK) if limits.network else ()
        uid = supervise.pick_unused_uid()
        folder, lock_fd = _create_locked_folder()
        try:
            temporary_folder = folder / "tmp"
            temporary_folder.mkdir()
            if uid is not None:
                for path in (folder, temporary_folder):
                    os.chown(path, uid, uid)
            launch = supervise.SandboxLaunch(
                command_prefix=[],
                launcher_path=str(supervise.LAUNCHER),
                folder=str(folder),
                temporary_folder=str(temporary_folder),
                seccomp=seccomp.build_filter(
                    allowed_families, shares_host_processes=True, allow_signals=self.abi >= launcher.SCOPE_ABI
                ),
                uid=uid,
                landlock={
                    "abi": self.abi,
                    "read": [str(path) for path in supervise.list_readable_paths(job, limits)],
                    "write": [str(folder)],
                    "devices": list(DEVICES),
                },
                kill_job=_kill,
                measure_files=lambda pids: _measure_files(folder, pids),
            )
            return await supervise.supervise_job(launch, job, limits)
        finally:
            try:
                await run_to_completion(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
            finally:
                os.close(lock_fd)


def get_landlock_abi() -> int:
    """Return the Landlock ABI version, or 0 if Landlock is unsupported or disabled."""
    size, flags = ctypes.c_size_t(0), ctypes.c_uint32(launcher.LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, launcher.libc.syscall(launcher.SYS_LANDLOCK_CREATE_RULESET, None, size, flags))


def _create_locked_folder() -> tuple[Path, int]:
    """Create and lock a folder. Return its path and the file descriptor that holds the lock."""
    # The folder gets its final name once it is locked, so that no other process mistakes it for a leftover.
    folder = Path(tempfile.mkdtemp(prefix="instar-new-"))
    lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    return folder.rename(folder.with_name(folder.name.replace("instar-new-", FOLDER_PREFIX, 1))), lock_fd


def remove_leftover_folders() -> None:
    """Remove the job folders of processes that were killed before they could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # the owner is alive and holds the lock, or it is another user's folder
            lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock_fd)


def _kill(root_pid: int) -> None:
    # On SIGTERM, the launcher kills the job's process group, which no process of the job can leave.
    with suppress(ProcessLookupError):
        os.kill(root_pid, signal.SIGTERM)


def _measure_files(folder: Path, pids: list[int]) -> tuple[int, int]:
    """Return the disk usage in bytes, including deleted open files, and the number of files and folders."""
    size = count = 0
    for root, _, names in os.walk(folder):
        count += len(names) + 1
        for name in names:
            with suppress(OSError):
                size += os.lstat(f"{root}/{name}").st_blocks * 512
    for pid in pids:
        with suppress(OSError):  # the process has exited
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        size += status.st_blocks * 512
    return size, count
