"""Measures how much of the CPU and of the GPUs other programs use."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

from instar.errors import ConfigError

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0
GPU_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CpuReading:
    time: float
    busy: float
    """The busy CPU seconds of the machine since it started."""
    own: dict[int, float]
    """The CPU seconds of each process of the run."""


class LoadMonitor:
    """Measures in a background thread. The processes of the run itself, which are those with the same
    supervisor, do not count."""

    def __init__(self, supervisor: int) -> None:
        try:
            import psutil
        except ImportError as error:
            raise ConfigError(
                "live.window.max_load: this requires psutil; install it with: pip install 'instar[local]'"
            ) from error
        self._psutil: Any = psutil
        self._supervisor = supervisor
        self._has_gpu = shutil.which("nvidia-smi") is not None
        self.load: float | None = None
        """The share that other programs use, the highest of CPU and GPUs; None before the first interval."""
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instar-load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop_event.set()

    def _run(self) -> None:
        previous = self._read_cpu()
        while not self._stop_event.wait(INTERVAL_SECONDS):
            current = self._read_cpu()
            load = compute_cpu_load(previous, current)
            previous = current
            self.load = max(load, self._read_gpu_load(set(current.own))) if self._has_gpu else load

    def _read_cpu(self) -> CpuReading:
        times = self._psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        # On Linux, the times of guests are included in those of users.
        busy -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        own: dict[int, float] = {}
        try:
            root = self._psutil.Process(self._supervisor)
            processes = [root, *root.children(recursive=True)]
        except self._psutil.Error:
            processes = [self._psutil.Process()]
        for process in processes:
            try:
                used = process.cpu_times()
            except self._psutil.Error:
                continue  # it has exited
            own[process.pid] = used.user + used.system
        return CpuReading(time.monotonic(), busy, own)

    def _read_gpu_load(self, own: set[int]) -> float:
        command = ["nvidia-smi", "pmon", "-c", "1", "-s", "u"]
        try:
            output = subprocess.run(
                command, capture_output=True, text=True, timeout=GPU_TIMEOUT_SECONDS, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("cannot measure the load of the GPU, so it is not limited: %s", error)
            self._has_gpu = False
            return 0.0
        return parse_gpu_load(output, own)


def compute_cpu_load(previous: CpuReading, current: CpuReading, cores: int | None = None) -> float:
    """Return the share of all cores that other programs used between two readings."""
    own = sum(max(0.0, used - previous.own.get(pid, 0.0)) for pid, used in current.own.items())
    core_seconds = (current.time - previous.time) * (cores or os.cpu_count() or 1)
    share = (current.busy - previous.busy - own) / core_seconds
    return min(1.0, max(0.0, share))


def parse_gpu_load(output: str, own: set[int]) -> float:
    """Return the highest share of a GPU that other programs use, from the output of `nvidia-smi pmon`."""
    loads: dict[str, float] = {}
    for line in output.splitlines():
        fields = line.split()
        if line.startswith("#") or len(fields) < 4 or not fields[1].isdigit() or int(fields[1]) in own:
            continue
        if fields[3].isdigit():
            loads[fields[0]] = loads.get(fields[0], 0.0) + int(fields[3]) / 100
    return min(1.0, max(loads.values(), default=0.0))
