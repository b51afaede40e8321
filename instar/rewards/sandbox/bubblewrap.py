"""A sandbox of namespaces: the job sees its own processes, its own network without a way out, and its own
files in memory."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from instar.errors import ConfigError
from instar.rewards.sandbox import seccomp
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult
from instar.rewards.sandbox.supervise import (
    LAUNCHER,
    MB,
    SandboxLaunch,
    descendant_pids,
    list_readable_paths,
    pick_unused_uid,
    supervise,
)

FOLDER, TEMPORARY = "/job", "/tmp"
INSIDE = "/run/launcher.py"
WRITABLE = (FOLDER, TEMPORARY, "/dev/shm")


class BubblewrapSandbox(Sandbox):
    name = "bubblewrap"

    def __init__(self) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise ConfigError("bubblewrap is not installed (no `bwrap` in PATH)")
        if not seccomp.is_supported():
            raise ConfigError(f"no seccomp filter is known for {os.uname().machine}")
        self.program = program

    async def run(self, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
        uid = pick_unused_uid()
        families = (seccomp.AF_INET, seccomp.AF_INET6, seccomp.AF_NETLINK)
        if not limits.network:  # of a network of its own; unix sockets of the machine's are not
            families += (seccomp.AF_UNIX,)
        launch = SandboxLaunch(
            command_prefix=[self.program, *_namespaces(uid, limits), *_files(job, limits), "--"],
            launcher_path=INSIDE,
            folder=FOLDER,
            temporary=TEMPORARY,
            seccomp=seccomp.build_filter(families, shares_host_processes=False),
            uid=uid,
            landlock=None,
            kill_job=_kill,
            measure_files=_usage,
        )
        return await supervise(launch, job, limits)


def _namespaces(uid: int | None, limits: SandboxLimits) -> list[str]:
    flags = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "job"]
    flags += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if uid is None:
        flags += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    else:  # the launcher changes to that user, and loses these two as it does
        flags += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return flags if limits.network else [*flags, "--unshare-net"]


def _files(job: SandboxJob, limits: SandboxLimits) -> list[str]:
    size = str(limits.files_mb * MB)
    flags = ["--dev", "/dev", "--proc", "/proc"]
    for path in WRITABLE:
        flags += ["--perms", "1777", "--size", size, "--tmpfs", path]
    paths = list_readable_paths(job, limits)
    for folder in _above([*paths, Path(INSIDE)]):
        flags += ["--perms", "0755", "--dir", str(folder)]
    for path in paths:
        if path.is_symlink() and path.parent == Path("/"):  # /bin, where it is /usr/bin
            flags += ["--symlink", str(path.readlink()), str(path)]
        else:
            flags += ["--ro-bind", str(path), str(path)]
    flags += ["--ro-bind", str(LAUNCHER), INSIDE]
    return [*flags, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def _above(paths: list[Path]) -> list[Path]:
    """The folders that lead to these; bubblewrap would make them for its own user alone."""
    made = {Path("/dev"), *(Path(p) for p in WRITABLE)}
    above = {folder for path in paths for folder in path.parents if folder != Path("/")} - made
    inside = {folder for folder in above if any(path == folder or path in folder.parents for path in paths)}
    return sorted(above - inside)


def _kill(root: int) -> None:
    """With the first process of the job's namespace the kernel ends all others, before bubblewrap ends."""
    for pid in descendant_pids(root)[:1] or [root]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _usage(processes: list[int]) -> tuple[int, int]:
    size = number = 0
    # Until bubblewrap has changed over to the job's files, these are the machine's own.
    if processes and Path(f"/proc/{processes[0]}/root{INSIDE}").exists():
        for folder in WRITABLE:
            with suppress(OSError):  # gone meanwhile
                use = os.statvfs(f"/proc/{processes[0]}/root{folder}")
                size += (use.f_blocks - use.f_bfree) * use.f_frsize
                number += use.f_files - use.f_ffree
    return size, number
