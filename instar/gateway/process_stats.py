"""Statistics of the gateway's process."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections import deque
from pathlib import Path

_PERIOD = 0.05
_MAX_SAMPLES = 6000
"""The number of samples in five minutes."""


class LoopLagMonitor:
    """Measures how late the event loop resumes its tasks."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=_MAX_SAMPLES)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _PERIOD
            await asyncio.sleep(_PERIOD)
            self._lags.append(max(0.0, loop.time() - due))

    def p99(self) -> float:
        """Return the 99th percentile of the lag in seconds."""
        lags = sorted(self._lags)
        return lags[int(0.99 * (len(lags) - 1))] if lags else 0.0


def memory_mb() -> float:
    """Return the resident memory of this process in MB, or its peak on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
