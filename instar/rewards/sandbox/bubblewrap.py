"""A sandbox that uses namespaces. The job has its own processes, a network without a route out, and its own
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
LAUNCHER_INSIDE = "/run/launcher.py"
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
        if not limits.network:  # without a network namespace, the job could reach the machine's unix sockets
            families += (seccomp.AF_UNIX,)
        launch = SandboxLaunch(
            command_prefix=[self.program, *_namespaces(uid, limits), *_files(job, limits), "--"],
            launcher_path=LAUNCHER_INSIDE,
            folder=FOLDER,
            temporary=TEMPORARY,
            seccomp=seccomp.build_filter(families, shares_host_processes=False),
            uid=uid,
            landlock=None,
            kill_job=_kill,
            measure_files=_measure_files,
        )
        return await supervise(launch, job, limits)


def _namespaces(uid: int | None, limits: SandboxLimits) -> list[str]:
    flags = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "job"]
    flags += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if uid is None:
        flags += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    else:  # the launcher changes to that user and thereby loses both capabilities
        flags += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return flags if limits.network else [*flags, "--unshare-net"]


def _files(job: SandboxJob, limits: SandboxLimits) -> list[str]:
    size = str(limits.files_mb * MB)
    flags = ["--dev", "/dev", "--proc", "/proc"]
    for path in WRITABLE:
        flags += ["--perms", "1777", "--size", size, "--tmpfs", path]
    paths = list_readable_paths(job, limits)
    for folder in _list_parents([*paths, Path(LAUNCHER_INSIDE)]):
        flags += ["--perms", "0755", "--dir", str(folder)]
    for path in paths:
        if path.is_symlink() and path.parent == Path("/"):  # such as /bin -> usr/bin
            flags += ["--symlink", str(path.readlink()), str(path)]
        else:
            flags += ["--ro-bind", str(path), str(path)]
    flags += ["--ro-bind", str(LAUNCHER), LAUNCHER_INSIDE]
    return [*flags, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def _list_parents(paths: list[Path]) -> list[Path]:
    """Return the parent folders of the paths, which bubblewrap would make accessible to its own user only."""
    mounted = {Path("/dev"), *(Path(p) for p in WRITABLE)}
    parents = {folder for path in paths for folder in path.parents if folder != Path("/")} - mounted
    bound = {folder for folder in parents if any(path == folder or path in folder.parents for path in paths)}
    return sorted(parents - bound)


def _kill(root: int) -> None:
    # When the first process of a PID namespace exits, the kernel kills all others, before bubblewrap exits.
    for pid in descendant_pids(root)[:1] or [root]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _measure_files(processes: list[int]) -> tuple[int, int]:
    size = count = 0
    # Until bubblewrap has switched to the job's root, these are the files of the machine.
    if processes and Path(f"/proc/{processes[0]}/root{LAUNCHER_INSIDE}").exists():
        for folder in WRITABLE:
            with suppress(OSError):  # the process has exited
                use = os.statvfs(f"/proc/{processes[0]}/root{folder}")
                size += (use.f_blocks - use.f_bfree) * use.f_frsize
                count += use.f_files - use.f_ffree
    return size, count
