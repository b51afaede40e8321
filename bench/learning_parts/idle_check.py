"""Check that no other process uses the machine, because a run is limited by time."""

from __future__ import annotations

import time
from pathlib import Path

from gateway_parts.processes import MeasurementError

CPU_TIMES_PATH = Path("/proc/stat")
INTERVAL_SECONDS = 3.0
MAX_BUSY_SHARE = 0.1


def check_idle() -> None:
    """Raise MeasurementError if other processes use more than MAX_BUSY_SHARE of the CPU time. This process
    sleeps meanwhile."""
    before = CPU_TIMES_PATH.read_text()
    time.sleep(INTERVAL_SECONDS)
    share = compute_busy_share(before, CPU_TIMES_PATH.read_text())
    if share > MAX_BUSY_SHARE:
        raise MeasurementError(
            f"other processes use {share:.0%} of the CPU time; at most {MAX_BUSY_SHARE:.0%} is allowed. Stop "
            "them and repeat the command, which continues with this run."
        )


def compute_busy_share(before: str, after: str) -> float:
    """Return the share of the CPU time that was used between two readings of /proc/stat."""
    (busy, total), (later_busy, later_total) = _sum_times(before), _sum_times(after)
    return (later_busy - busy) / (later_total - total)


def _sum_times(text: str) -> tuple[int, int]:
    """Return the busy and the total time of all CPUs."""
    # The fields are user, nice, system, idle, iowait, irq, softirq and steal. The guests' times, which
    # follow, are included in user and nice.
    times = [int(value) for value in text.splitlines()[0].split()[1:9]]
    return sum(times) - times[3] - times[4], sum(times)
