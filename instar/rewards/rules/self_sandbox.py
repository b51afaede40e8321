"""Lets a process sandbox itself permanently, to only read Python's files and use open descriptors."""

from __future__ import annotations

import sys
from pathlib import Path

from instar.rewards.sandbox import seccomp
from instar.rewards.sandbox.landlock import DEVICES, MIN_ABI, landlock_abi
from instar.rewards.sandbox.launcher import PR_SET_NO_NEW_PRIVS, apply_landlock, apply_seccomp, prctl

SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")


def can_sandbox_self() -> bool:
    return landlock_abi() >= MIN_ABI and seccomp.is_supported()


def sandbox_self() -> None:
    """Stop this process from writing files, starting programs, opening sockets and sending signals."""
    paths = [*SYSTEM_PATHS, sys.prefix, sys.base_prefix, *sys.path]
    readable = sorted({str(path.resolve()) for each in paths if each and (path := Path(each)).exists()})
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    apply_landlock(landlock_abi(), readable, [], list(DEVICES), allow_execute=False)
    apply_seccomp(
        seccomp.build_filter((), shares_host_processes=True, allow_signals=False, deny_new_processes=True)
    )
