"""Imported by Python at startup, because this folder is on the PYTHONPATH of torture runs.

Shifts the wall clock of the process if CLOCK_ENV is set, and plants a bug in a role if BUG_ENV is set.
"""

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

CLOCK_ENV = "TORTURE_CLOCK"
BUG_ENV = "TORTURE_BUG"


def shift_clock(path: str) -> None:
    """Add the number of seconds in the file to the wall clock. The file may change at any time."""
    with Path(path).open("rb") as file:
        shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    read_offset = struct.Struct("d").unpack_from
    real_time: Callable[[], float] = time.time
    real_time_ns: Callable[[], int] = time.time_ns
    time.time = lambda: real_time() + read_offset(shared)[0]
    time.time_ns = lambda: real_time_ns() + int(read_offset(shared)[0] * 1e9)


if CLOCK_ENV in os.environ:
    shift_clock(os.environ[CLOCK_ENV])
if BUG_ENV in os.environ and "instar.cluster.role" in sys.orig_argv:
    from tests.torture.planted_bugs import plant_bug

    plant_bug(os.environ[BUG_ENV], sys.orig_argv[sys.orig_argv.index("instar.cluster.role") + 1])
