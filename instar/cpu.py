"""CPU features, and a workaround for virtual machines that report AMX without supporting it."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""oneDNN reads this environment variable before its first operation."""
PROBE_SECONDS = 120.0
_PROBE = """
import torch
left, right = torch.ones(33, 64, dtype=torch.bfloat16), torch.ones(96, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(left, right)
"""


@functools.cache
def cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return frozenset()
    lines = info.read_text().splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def disable_broken_amx(cache: Path) -> None:
    """Keep oneDNN from using AMX if that kills the process, as it does on some virtual machines.

    The first call on a machine tries a matrix product in a subprocess; ``cache`` keeps the result.
    """
    if "amx_bf16" not in cpu_flags() or ISA_LIMIT in os.environ:
        return
    key = "\n".join([*sorted(cpu_flags()), platform.release(), platform.node(), _torch_version()])
    file = cache / "cpu" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text("works" if _survives_probe() else "broken")
        partial.replace(file)
    if file.read_text() == "broken":
        os.environ[ISA_LIMIT] = "AVX512_CORE_FP16"


def _torch_version() -> str:
    import torch

    return torch.__version__


def _survives_probe() -> bool:
    try:
        command = [sys.executable, "-c", _PROBE]
        probe = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True  # unknown: leave oneDNN's own choice
    return probe.returncode >= 0  # negative: killed by a signal
