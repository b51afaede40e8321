"""CPU feature detection, and process settings for running torch on a CPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from instar.umask import USER_UMASK, use_umask

ISA_LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Environment variable that limits oneDNN's instruction set. oneDNN reads it before its first operation."""
PROBE_TIMEOUT_SECONDS = 120.0
_PROBE_CODE = """
import torch
left, right = torch.ones(33, 64, dtype=torch.bfloat16), torch.ones(96, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(left, right)
"""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MAX_THRESHOLD_BYTES = 2**31 - 1
_LARGE_BLOCK_BYTES = 1024 * 1024


@functools.cache
def cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return frozenset()
    lines = info.read_text().splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def read_free_memory() -> int:
    """Return the bytes of memory that new processes can use."""
    try:
        with Path("/proc/meminfo").open() as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 4 << 30  # a guess for systems other than Linux


@functools.cache
def disable_broken_amx(cache_folder: Path) -> None:
    """Keep oneDNN from using AMX if AMX instructions kill the process, as on virtual machines that report AMX
    without supporting it. The first call on a machine runs a matrix product in a subprocess and saves the
    result in ``cache_folder``. If `ISA_LIMIT_VARIABLE` is already set, nothing changes."""
    if "amx_bf16" not in cpu_flags() or ISA_LIMIT_VARIABLE in os.environ:
        return
    import torch

    key = "\n".join([*sorted(cpu_flags()), platform.release(), platform.node(), torch.__version__])
    file = cache_folder / "cpu" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not file.is_file():
        with use_umask(USER_UMASK):
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_text("works" if _survives_probe() else "broken")
        partial.replace(file)
    if file.read_text() == "broken":
        os.environ[ISA_LIMIT_VARIABLE] = "AVX512_CORE_FP16"


def _survives_probe() -> bool:
    try:
        command = [sys.executable, "-c", _PROBE_CODE]
        probe = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True  # Unknown, so leave the choice of instructions to oneDNN.
    return probe.returncode >= 0  # A negative code means that a signal killed the process.


def keep_freed_pages() -> None:
    """Make malloc keep the pages of freed tensors, including in threads started later. By default, glibc
    maps every large block separately, so each activation causes new page faults, which take up to half the
    time of a training pass on a CPU. Without glibc, this function does nothing."""
    if (mallopt := _find_glibc_function("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAX_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MAX_THRESHOLD_BYTES)
        # Arenas other than the main one map blocks over 64 MB regardless of the threshold.
        mallopt(_M_ARENA_MAX, 1)


def limit_fragmentation() -> None:
    """Make malloc map every large block separately, and use one arena for all threads. By default, glibc
    learns from freed blocks to allocate even large ones between small ones, in an arena per thread, so that
    the memory of a server with requests of many sizes grows for hours. Without glibc, do nothing."""
    if (mallopt := _find_glibc_function("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def release_freed_pages() -> None:
    """Return the pages of freed memory to the operating system. By default, glibc keeps the pages between two
    blocks that are in use. Without glibc, this function does nothing."""
    if (malloc_trim := _find_glibc_function("malloc_trim")) is not None:
        malloc_trim(0)


def _find_glibc_function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
