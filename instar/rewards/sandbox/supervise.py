"""Starts a job with the launcher, enforces its limits, and kills all of its processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from instar.async_utils import run_to_completion
from instar.errors import ScoreError
from instar.rewards.sandbox.base import SandboxJob, SandboxLimitName, SandboxLimits, SandboxResult

LAUNCHER = Path(__file__).with_name("launcher.py")
CHECK_INTERVAL_SECONDS = 0.02
KILL_TIMEOUT_SECONDS = 10.0
MB = 2**20
LIMIT_MESSAGES: dict[SandboxLimitName, str] = {
    "time": "ran longer than {seconds:g} s",
    "memory": "used more than {memory_mb} MB of memory",
    "processes": "had more than {processes} processes and threads",
    "output": "wrote more than {output_kb} KB of output",
    "files": "wrote more than {files_mb} MB or more than {max_files} files",
}

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC_NAMES = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
NETWORK_ETC_NAMES = ("resolv.conf", "hosts", "nsswitch.conf", "ssl/certs", "ca-certificates")


@dataclass(frozen=True)
class SandboxLaunch:
    """How to start and supervise a job in a sandbox."""

    command_prefix: list[str]
    """The program and options before the launcher's command, such as ``bwrap`` with its options."""
    launcher_path: str
    folder: str
    temporary_folder: str
    seccomp: bytes
    uid: int | None
    landlock: dict[str, Any] | None
    kill_job: Callable[[int], None]
    """Kills all processes of the job. The argument is the id of the process that was started."""
    measure_files: Callable[[list[int]], tuple[int, int]]
    """Returns the total size in bytes and the number of the job's files, given the job's process ids."""


def list_readable_paths(job: SandboxJob, limits: SandboxLimits) -> list[Path]:
    """Return the existing paths that a job may read: system folders, some files in /etc, the current Python
    installation, and ``job.readable_paths``. Paths below /usr are omitted, because /usr itself is listed."""
    python = [Path(p) for p in (sys.prefix, sys.base_prefix)]
    python += [*(p.resolve() for p in python), Path(sys.executable).resolve().parent.parent]
    etc_names = (*ETC_NAMES, *(NETWORK_ETC_NAMES if limits.network else ()))
    system = [*map(Path, SYSTEM_PATHS), *(Path("/etc", name) for name in etc_names)]
    own = [Path(p).absolute() for p in job.readable_paths]
    existing = {p for p in (*system, *python, *own) if p.exists() and Path("/usr") not in p.parents}
    return sorted(existing, key=lambda path: len(path.parts))


def pick_unused_uid() -> int | None:
    """Return a random, probably unused user id, or None if this process is not root or has few mapped ids."""
    # The kernel limits processes per user. A job with its own user id does not share the limit with others.
    if os.geteuid() != 0:
        return None
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, size = max(((int(inside), int(n)) for inside, _, n in ranges), key=lambda r: r[1])
    upper = min(first + size, 2**31 - 2)
    return random.randrange(max(first, upper // 2), upper) if size > 1000 else None


async def supervise_job(launch: SandboxLaunch, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
    """Run a job and return its result. Raises ScoreError if the sandbox cannot start it."""
    status_fd, child_status_fd = os.pipe()
    os.set_blocking(status_fd, False)
    try:
        process = await asyncio.create_subprocess_exec(
            *launch.command_prefix,
            *(sys.executable, "-I", "-S", "-B", launch.launcher_path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": os.defpath},
            cwd="/",
            pass_fds=(child_status_fd,) if job.channel is None else (child_status_fd, job.channel.fileno()),
            start_new_session=True,
        )
        settings = json.dumps(_build_settings(launch, job, limits, child_status_fd)).encode()
        os.close(child_status_fd)
        child_status_fd = -1
        if job.channel is not None:  # the other end must notice when the job exits
            job.channel.close()
        exceeded, output = await _watch(process, settings, launch, limits)
        try:
            status = os.read(status_fd, 4096)
        except BlockingIOError:  # the launcher has written nothing
            status = b""
    finally:
        os.close(status_fd)
        if child_status_fd >= 0:
            os.close(child_status_fd)
    text = output.decode(errors="replace")
    if status != b"ready" and exceeded != "time":
        problem = (status.decode(errors="replace") or text).strip()
        raise ScoreError(f"the sandbox could not start the job: {problem:.500}", retryable=True)
    assert process.returncode is not None
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return SandboxResult(code, text, exceeded, _describe_failure(code, exceeded, limits))


def _build_settings(
    launch: SandboxLaunch, job: SandboxJob, limits: SandboxLimits, status_fd: int
) -> dict[str, Any]:
    requested = {
        "RLIMIT_AS": limits.memory_mb * MB,
        "RLIMIT_FSIZE": limits.files_mb * MB,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    if launch.landlock is not None and launch.uid is None:
        requested["RLIMIT_NPROC"] += _count_user_tasks()  # the kernel counts all tasks of this user
    rlimits: dict[str, int] = {}
    for name, value in requested.items():
        _, hard_limit = resource.getrlimit(getattr(resource, name))
        rlimits[name] = value if hard_limit < 0 else min(value, hard_limit)
    return {
        "command": list(job.command),
        "files": dict(job.files),
        # This process's variables are not passed on, because they may contain API keys.
        "environment": {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": launch.folder,
            "TMPDIR": launch.temporary_folder,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **{name: f"{launch.folder}/{file}" for name, file in job.file_variables.items()},
        },
        "folder": launch.folder,
        "uid": launch.uid,
        "limits": rlimits,
        "landlock": launch.landlock,
        "seccomp": launch.seccomp.hex(),
        "status": status_fd,
        "channel": None if job.channel is None else job.channel.fileno(),
    }


async def _watch(
    process: asyncio.subprocess.Process, settings: bytes, launch: SandboxLaunch, limits: SandboxLimits
) -> tuple[SandboxLimitName | None, bytes]:
    """Wait until the job exits or exceeds a limit, kill its processes, and return the limit and output."""
    output = bytearray()
    output_full = asyncio.Event()
    exit_task = asyncio.create_task(process.wait())
    tasks = [
        asyncio.create_task(_send_settings(process, settings)),
        asyncio.create_task(_read_output(process, output, limits.output_kb * 1024, output_full)),
    ]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.seconds
    exceeded: SandboxLimitName | None = None
    try:
        while exceeded is None and not exit_task.done():
            seconds_left = max(0.0, deadline - loop.time())
            await asyncio.wait([exit_task], timeout=min(CHECK_INTERVAL_SECONDS, seconds_left))
            if output_full.is_set():
                exceeded = "output"
            elif not exit_task.done():
                is_late = loop.time() >= deadline
                exceeded = "time" if is_late else _find_exceeded_limit(process.pid, launch, limits)
    finally:
        exit_task.cancel()
        await run_to_completion(_kill_and_wait(process, launch, tasks))
    return exceeded, bytes(output)


def _find_exceeded_limit(pid: int, launch: SandboxLaunch, limits: SandboxLimits) -> SandboxLimitName | None:
    pids = find_descendant_pids(pid)
    task_count = sum(len(_list_folder(f"/proc/{child_pid}/task")) for child_pid in pids)
    # Up to two tasks belong to the launcher and bubblewrap, which do not count towards the limit.
    if task_count > limits.processes + 2:
        return "processes"
    # PSS is slow to read, so it is read only if RSS exceeds the limit.
    if all(_measure_memory(pids, metric) > limits.memory_mb * MB for metric in ("rss", "pss")):
        return "memory"
    size, count = launch.measure_files(pids)
    return "files" if size > limits.files_mb * MB or count > limits.max_files else None


async def _kill_and_wait(
    process: asyncio.subprocess.Process, launch: SandboxLaunch, tasks: Iterable[asyncio.Task[None]]
) -> None:
    if process.returncode is None:
        launch.kill_job(process.pid)
        try:
            await asyncio.wait_for(process.wait(), KILL_TIMEOUT_SECONDS)
        except TimeoutError:
            for pid in (*find_descendant_pids(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()
    _, pending = await asyncio.wait(tasks, timeout=KILL_TIMEOUT_SECONDS)
    for task in pending:
        task.cancel()


async def _send_settings(process: asyncio.subprocess.Process, settings: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # the launcher died; the caller reports why
        process.stdin.write(settings)
        await process.stdin.drain()
    process.stdin.close()


async def _read_output(
    process: asyncio.subprocess.Process, output: bytearray, max_bytes: int, output_full: asyncio.Event
) -> None:
    assert process.stdout is not None
    while chunk := await process.stdout.read(65536):
        output += chunk[: max_bytes - len(output)]
        if len(output) == max_bytes:
            output_full.set()


def find_descendant_pids(root_pid: int) -> list[int]:
    """Return the ids of all descendants of a process. Orphans count, because the sandbox adopts them."""
    descendants: list[int] = []
    unvisited = [root_pid]
    while unvisited:
        pid = unvisited.pop()
        for task in _list_folder(f"/proc/{pid}/task"):
            with suppress(OSError):
                children = [int(c) for c in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
                descendants += children
                unvisited += children
    return descendants


def _list_folder(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - only the names are needed
    except OSError:  # the process has exited
        return []


def _measure_memory(pids: Iterable[int], metric: str) -> int:
    """Return the memory of the processes in bytes. Unlike ``rss``, ``pss`` counts shared pages only once."""
    total = 0
    for pid in pids:
        with suppress(OSError, StopIteration, ValueError):  # the process has exited
            if metric == "rss":
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            else:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return total


def _count_user_tasks() -> int:
    uid = os.getuid()
    total = 0
    for name in _list_folder("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if Path(f"/proc/{name}").stat().st_uid == uid:
                    total += len(_list_folder(f"/proc/{name}/task"))
    return total


def _describe_failure(code: int, exceeded: SandboxLimitName | None, limits: SandboxLimits) -> str:
    if exceeded is not None:
        return LIMIT_MESSAGES[exceeded].format(**asdict(limits))
    if code > 128:
        with suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exited with code {code}" if code else ""
