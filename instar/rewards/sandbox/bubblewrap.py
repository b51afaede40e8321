"""A sandbox with namespaces. A job sees only its processes and allowed files, and by default no network."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from instar.errors import ConfigError
from instar.rewards.sandbox import seccomp, supervise
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult

JOB_FOLDER, TEMPORARY_FOLDER = "/job", "/tmp"
MOUNTED_LAUNCHER = "/run/launcher.py"
WRITABLE_FOLDERS = (JOB_FOLDER, TEMPORARY_FOLDER, "/dev/shm")


class BubblewrapSandbox(Sandbox):
    name = "bubblewrap"

    def __init__(self) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise ConfigError("`bwrap` was not found in PATH; install bubblewrap")
        seccomp.check_supported()
        self.program = program

    async def run(self, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
        uid = supervise.pick_unused_uid()
        allowed_families = (seccomp.AF_INET, seccomp.AF_INET6, seccomp.AF_NETLINK)
        # With the host's network, a job could connect to the host's abstract Unix sockets.
        if not limits.network:
            allowed_families += (seccomp.AF_UNIX,)
        flags = [*_build_namespace_flags(uid, limits), *_build_mount_flags(job, limits)]
        launch = supervise.SandboxLaunch(
            command_prefix=[self.program, *flags, "--"],
            launcher_path=MOUNTED_LAUNCHER,
            folder=JOB_FOLDER,
            temporary_folder=TEMPORARY_FOLDER,
            seccomp=seccomp.build_filter(allowed_families, shares_host_processes=False),
            uid=uid,
            landlock=None,
            kill_job=_kill,
            measure_files=_measure_files,
        )
        return await supervise.supervise_job(launch, job, limits)


def _build_namespace_flags(uid: int | None, limits: SandboxLimits) -> list[str]:
    flags = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "job"]
    flags += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if uid is None:
        flags += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    else:  # the launcher needs both capabilities to switch to that user, and drops them when it does
        flags += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return flags if limits.network else [*flags, "--unshare-net"]


def _build_mount_flags(job: SandboxJob, limits: SandboxLimits) -> list[str]:
    size = str(limits.files_mb * supervise.MB)
    flags = ["--dev", "/dev", "--proc", "/proc"]
    for path in WRITABLE_FOLDERS:
        flags += ["--perms", "1777", "--size", size, "--tmpfs", path]
    paths = supervise.list_readable_paths(job, limits)
    # Create the parent folders here, because bubblewrap would make them accessible to its own user only.
    parents = {folder for path in (*paths, Path(MOUNTED_LAUNCHER)) for folder in path.parents}
    parents -= {Path("/"), Path("/dev"), *map(Path, WRITABLE_FOLDERS)}
    for folder in sorted(parents):
        if not any(path == folder or path in folder.parents for path in paths):
            flags += ["--perms", "0755", "--dir", str(folder)]
    for path in paths:
        if path.is_symlink() and path.parent == Path("/"):  # such as /bin -> usr/bin
            flags += ["--symlink", str(path.readlink()), str(path)]
        else:
            flags += ["--ro-bind", str(path), str(path)]
    flags += ["--ro-bind", str(supervise.LAUNCHER), MOUNTED_LAUNCHER]
    return [*flags, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def _kill(root_pid: int) -> None:
    # It is enough to kill the first process in the PID namespace: the kernel then kills all others.
    for pid in supervise.find_descendant_pids(root_pid)[:1] or [root_pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _measure_files(pids: list[int]) -> tuple[int, int]:
    size = count = 0
    # Until bubblewrap has changed the root, the process still sees the machine's files, which do not count.
    if pids and Path(f"/proc/{pids[0]}/root{MOUNTED_LAUNCHER}").exists():
        for folder in WRITABLE_FOLDERS:
            with suppress(OSError):  # the process has exited
                usage = os.statvfs(f"/proc/{pids[0]}/root{folder}")
                size += (usage.f_blocks - usage.f_bfree) * usage.f_frsize
                count += usage.f_files - usage.f_ffree
    return size, count
