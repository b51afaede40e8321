"""Starts a job through the launcher, watches it, and ends it with all that it started."""

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

from instar.errors import ScoreError
from instar.rewards.sandbox.base import (
    LIMIT_MESSAGES,
    SandboxJob,
    SandboxLimitName,
    SandboxLimits,
    SandboxResult,
)

LAUNCHER = Path(__file__).with_name("launcher.py")
EVERY = 0.02
"""Seconds between two looks at a job."""
PATIENCE = 10.0
"""Seconds for a killed job to be gone."""
MB = 2**20

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
OF_NETWORK = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/ssl/certs",
    "/etc/ca-certificates",
)


@dataclass(frozen=True)
class SandboxLaunch:
    """How a sandbox starts a job, ends it, and sees what it wrote."""

    command_prefix: list[str]
    """What stands before the Python that runs the launcher."""
    launcher_path: str
    """Where the launcher lies, for it."""
    folder: str
    """Where the job works, as it sees it itself."""
    temporary: str
    seccomp: bytes
    uid: int | None
    landlock: dict[str, Any] | None
    kill_job: Callable[[int], None]
    """Ends everything below the process that was started."""
    measure_files: Callable[[list[int]], tuple[int, int]]
    """Bytes and number of the job's files, given its processes."""


def list_readable_paths(job: SandboxJob, limits: SandboxLimits) -> list[Path]:
    """What a job may read of this machine: the system's programs, this Python, and what it was given."""
    python = [Path(p) for p in (sys.prefix, sys.base_prefix)]
    python += [*(p.resolve() for p in python), Path(sys.executable).resolve().parent.parent]
    named = [Path(p) for p in (*SYSTEM, *SETTINGS, *(OF_NETWORK if limits.network else ()))]
    found = {p for p in (*named, *python, *(Path(p).absolute() for p in job.readable_paths)) if p.exists()}
    inside_usr = {p for p in found if Path("/usr") in p.parents}
    return sorted(found - inside_usr, key=lambda path: len(path.parts))


def pick_unused_uid() -> int | None:
    """A user that nobody else is, where this process may become one: the kernel counts a user's processes."""
    if os.geteuid() != 0:
        return None
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, size = max(((int(inside), int(n)) for inside, _, n in ranges), key=lambda r: r[1])
    upper = min(first + size, 2**31 - 2)
    return random.randrange(max(first, upper // 2), upper) if size > 1000 else None


async def supervise(launch: SandboxLaunch, job: SandboxJob, limits: SandboxLimits) -> SandboxResult:
    status, theirs = os.pipe()
    os.set_blocking(status, False)
    try:
        process = await asyncio.create_subprocess_exec(
            *launch.command_prefix,
            *(sys.executable, "-I", "-S", "-B", launch.launcher_path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": os.defpath},
            cwd="/",
            pass_fds=(theirs,),
            start_new_session=True,
        )
        orders = json.dumps(_orders(launch, job, limits, theirs)).encode()
        os.close(theirs)
        theirs = -1
        stopped, output = await _watch(process, orders, launch, limits)
        said = _read(status)
    finally:
        os.close(status)
        if theirs >= 0:
            os.close(theirs)
    text = output.decode(errors="replace")
    if said != b"ready" and stopped != "time":
        raise ScoreError(
            f"the sandbox failed: {(said.decode(errors='replace') or text).strip():.500}", retryable=True
        )
    assert process.returncode is not None
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return SandboxResult(code, text, stopped, _reason(code, stopped, limits))


def _orders(launch: SandboxLaunch, job: SandboxJob, limits: SandboxLimits, status: int) -> dict[str, Any]:
    memory, files = limits.memory_mb * MB, limits.files_mb * MB
    bounds = {
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": files,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    held = {name: resource.getrlimit(getattr(resource, name))[1] for name in bounds}
    if launch.landlock is not None and launch.uid is None:
        bounds["RLIMIT_NPROC"] += _tasks_of_this_user()
    return {
        "command": list(job.command),
        "files": dict(job.files),
        "environment": _environment(launch, job),
        "folder": launch.folder,
        "uid": launch.uid,
        "limits": {
            name: value if held[name] < 0 else min(value, held[name]) for name, value in bounds.items()
        },
        "landlock": launch.landlock,
        "seccomp": launch.seccomp.hex(),
        "status": status,
    }


def _environment(launch: SandboxLaunch, job: SandboxJob) -> dict[str, str]:
    """Nothing of ours is in it."""
    python = str(Path(sys.executable).parent)
    return {
        "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": launch.folder,
        "TMPDIR": launch.temporary,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **{name: f"{launch.folder}/{file}" for name, file in job.file_variables.items()},
    }


async def _watch(
    process: asyncio.subprocess.Process, orders: bytes, launch: SandboxLaunch, limits: SandboxLimits
) -> tuple[SandboxLimitName | None, bytes]:
    """Until the job has ended, or a limit ended it. Whatever happens, nothing of it is left."""
    output = bytearray()
    full = asyncio.Event()
    tasks = [
        asyncio.create_task(_feed(process, orders)),
        asyncio.create_task(_drain(process, output, limits.output_kb * 1024, full)),
    ]
    try:
        stopped = await _until_stopped(process, launch, limits, full)
    finally:
        await asyncio.shield(_end(process, launch, tasks))
    return stopped, bytes(output)


async def _until_stopped(
    process: asyncio.subprocess.Process, launch: SandboxLaunch, limits: SandboxLimits, full: asyncio.Event
) -> SandboxLimitName | None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.seconds
    ended = asyncio.create_task(process.wait())
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=min(EVERY, max(0.0, deadline - loop.time())))
            if full.is_set():
                return "output"
            if ended.done():
                break
            if loop.time() >= deadline:
                return "time"
            if stop := _over(process.pid, launch, limits):
                return stop
    finally:
        ended.cancel()
    return None


def _over(root: int, launch: SandboxLaunch, limits: SandboxLimits) -> SandboxLimitName | None:
    processes = descendant_pids(root)
    tasks = sum(len(_names(f"/proc/{pid}/task")) for pid in processes)
    # The launcher, or bubblewrap, are not the job's.
    if tasks > limits.processes + 2:
        return "processes"
    if (
        _memory(processes, "rss") > limits.memory_mb * MB
        and _memory(processes, "pss") > limits.memory_mb * MB
    ):
        return "memory"
    size, number = launch.measure_files(processes)
    return "files" if size > limits.files_mb * MB or number > limits.files else None


async def _end(
    process: asyncio.subprocess.Process, launch: SandboxLaunch, tasks: Iterable[asyncio.Task[None]]
) -> None:
    """Kill what is left and see that it is gone; its output ends when it has."""
    if process.returncode is None:
        launch.kill_job(process.pid)
        try:
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            for pid in (*descendant_pids(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()
    _, pending = await asyncio.wait(tasks, timeout=PATIENCE)
    for task in pending:
        task.cancel()


async def _feed(process: asyncio.subprocess.Process, orders: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it died first; its status says so
        process.stdin.write(orders)
        await process.stdin.drain()
    process.stdin.close()


async def _drain(
    process: asyncio.subprocess.Process, output: bytearray, most: int, full: asyncio.Event
) -> None:
    assert process.stdout is not None
    while chunk := await process.stdout.read(65536):
        output += chunk[: most - len(output)]
        if len(output) == most:
            full.set()


def descendant_pids(root: int) -> list[int]:
    """Every process that descends from this one; orphans of a job do too, as their parent becomes its first
    process."""
    found: list[int] = []
    ahead = [root]
    while ahead:
        pid = ahead.pop()
        for task in _names(f"/proc/{pid}/task"):
            with suppress(OSError):
                children = [int(c) for c in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
                found += children
                ahead += children
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, of a folder of /proc
    except OSError:  # the process is gone
        return []


def _memory(processes: Iterable[int], kind: str) -> int:
    """``rss`` is quick and counts what processes share once for each; ``pss`` counts it once."""
    total = 0
    for pid in processes:
        with suppress(OSError, StopIteration, ValueError):  # it is gone
            if kind == "rss":
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            else:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return total


def _tasks_of_this_user() -> int:
    me = os.getuid()
    total = 0
    for name in _names("/proc"):
        if name.isdigit():
            with suppress(OSError):
                total += len(_names(f"/proc/{name}/task")) if Path(f"/proc/{name}").stat().st_uid == me else 0
    return total


def _read(status: int) -> bytes:
    try:
        return os.read(status, 4096)
    except BlockingIOError:
        return b""


def _reason(code: int, stopped: SandboxLimitName | None, limits: SandboxLimits) -> str:
    if stopped is not None:
        return LIMIT_MESSAGES[stopped].format(**asdict(limits))
    if code > 128:
        with suppress(ValueError):
            return f"it was ended by {signal.Signals(code - 128).name}"
    return f"it ended with exit code {code}" if code else ""
