"""Drops privileges and executes a job. The launcher runs as a script and uses only the standard library. It
reads its settings as JSON from stdin, and writes ``ready`` or an error to the pipe in the setting ``status``.
If ``landlock`` is set, the launcher stays outside the sandbox as the job's parent, and kills all of the job's
processes when the job exits or on SIGTERM."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAP_AMBIENT = 1, 8, 22, 47
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
PR_CAP_AMBIENT_RAISE, SECCOMP_MODE_FILTER = 2, 2
CAP_DAC_READ_SEARCH, LINUX_CAPABILITY_VERSION_3 = 2, 0x20080522
EXEC_FAILED_EXIT_CODE = 127

# Constants from linux/landlock.h. The system calls have the same numbers on every architecture.
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
READ_ACCESS = EXECUTE | READ_FILE | READ_DIR
FILE_ACCESS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
SCOPE_SOCKETS_AND_SIGNALS = 3
IOCTL_ABI, SCOPE_ABI = 5, 6
"""The first Landlock ABIs that restrict device ioctls (5), and abstract Unix sockets and signals (6)."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    settings: dict[str, Any] = json.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(settings["status"], False)
    if settings["landlock"] is None:
        exec_job(settings)
    supervise(settings)


def supervise(settings: dict[str, Any]) -> NoReturn:
    """Run the job in its own process group. When it exits, kill the group and exit with the same code."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # Until the handler is set, SIGTERM would end only this process and leave the job running.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    job_pid = os.fork()
    if job_pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.setsid()
        exec_job(settings)
    os.close(settings["status"])
    if settings["channel"] is not None:
        os.close(settings["channel"])

    def kill_job(*_: Any) -> None:
        try:
            os.killpg(job_pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(job_pid, signal.SIGKILL)  # the job has no process group yet

    signal.signal(signal.SIGTERM, kill_job)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # The job is reaped only after its group is killed, so that the group id cannot be reused.
    os.waitid(os.P_PID, job_pid, os.WEXITED | os.WNOWAIT)
    kill_job()
    _, status = os.waitpid(job_pid, 0)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def exec_job(settings: dict[str, Any]) -> NoReturn:
    """Write the job's files, apply all restrictions, and execute the command."""
    try:
        if settings["uid"] is not None:
            change_user(settings["uid"], keep_search_access=settings["landlock"] is not None)
        os.chdir(settings["folder"])
        for name, text in settings["files"].items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="replace")
            path.chmod(0o755)  # one of the files may be the command
        for name, value in settings["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if settings["landlock"] is not None:
            apply_landlock(**settings["landlock"])
        apply_seccomp(bytes.fromhex(settings["seccomp"]))
    except OSError as error:
        os.write(settings["status"], f"{error}".encode())
        os._exit(1)
    os.write(settings["status"], b"ready")
    try:
        os.execvpe(settings["command"][0], settings["command"], settings["environment"])
    except OSError as error:
        sys.stderr.write(f"{settings['command'][0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(EXEC_FAILED_EXIT_CODE)


def change_user(uid: int, *, keep_search_access: bool) -> None:
    """Switch to the user ``uid``. With ``keep_search_access``, keep CAP_DAC_READ_SEARCH if this process has
    it, because Python may be in a folder such as /root. Landlock still restricts which files it can read."""
    if keep_search_access:
        status = Path("/proc/self/status").read_text()
        permitted = next(line for line in status.splitlines() if line.startswith("CapPrm:"))
        keep_search_access = bool(int(permitted.split()[1], 16) >> CAP_DAC_READ_SEARCH & 1)
    if keep_search_access:
        prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if keep_search_access:
        bit = 1 << CAP_DAC_READ_SEARCH
        header = struct.pack("=Ii", LINUX_CAPABILITY_VERSION_3, 0)
        check_result(libc.capset(header, struct.pack("=6I", bit, bit, bit, 0, 0, 0)), "capset")
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH)


def apply_landlock(
    abi: int, read: list[str], write: list[str], devices: list[str], *, allow_execute: bool = True
) -> None:
    """Allow access only to the listed paths. Files under ``read`` may be executed if ``allow_execute`` is
    True. From SCOPE_ABI on, also deny signals and abstract socket connections that leave the sandbox."""
    all_access = 2 * IOCTL_DEVICE - 1 if abi >= IOCTL_ABI else IOCTL_DEVICE - 1
    attributes = struct.pack("=QQQ", all_access, 0, SCOPE_SOCKETS_AND_SIGNALS if abi >= SCOPE_ABI else 0)
    size = 24 if abi >= SCOPE_ABI else 8
    ruleset = check_result(libc.syscall(SYS_LANDLOCK_CREATE_RULESET, attributes, size, 0), "landlock")
    rules = [(path, READ_ACCESS if allow_execute else READ_ACCESS & ~EXECUTE) for path in read]
    rules += [(path, all_access & ~(MAKE_CHAR | MAKE_BLOCK)) for path in write]
    rules += [(path, READ_FILE | WRITE_FILE) for path in devices]
    for path, access in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if Path(path).is_dir() else access & FILE_ACCESS
        rule = struct.pack("=Qi", allowed & all_access, descriptor)
        check_result(
            libc.syscall(SYS_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0), "landlock"
        )
        os.close(descriptor)
    check_result(libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock")
    os.close(ruleset)


def apply_seccomp(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    filter_header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(filter_header))


def prctl(option: int, *arguments: Any) -> None:
    padded = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    padded += [ctypes.c_ulong(0)] * (4 - len(padded))
    check_result(libc.prctl(option, *padded), f"prctl({option})")


def check_result(result: int, name: str) -> int:
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{name}: {os.strerror(error_number)}")
    return result


if __name__ == "__main__":
    main()
