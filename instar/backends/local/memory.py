"""Keep the pages of freed tensors instead of handing them back to the system.

glibc gives every large block its own mapping, so each activation is faulted in page by page again:
that takes up to half of a training pass on a CPU.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST = 2**31 - 1


def keep_freed_pages() -> None:
    """For this process, in threads started from here on. Does nothing where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)
        # A thread's own arena maps blocks over 64 MB whatever the threshold is; the main one does not.
        mallopt(_M_ARENA_MAX, 1)
