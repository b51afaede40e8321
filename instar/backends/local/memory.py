"""Keeps the pages of freed tensors instead of returning them to the system.

glibc maps every large block separately, so that each activation causes new page faults. On a CPU, that takes
up to half of the time of a training pass.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST = 2**31 - 1


def keep_freed_pages() -> None:
    """Make malloc keep freed pages in this process, including threads that it starts later. Does nothing
    without glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)
        # Arenas of threads map blocks over 64 MB regardless of the threshold; the main arena does not.
        mallopt(_M_ARENA_MAX, 1)
