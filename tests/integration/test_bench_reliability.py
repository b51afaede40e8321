"""Tests of short runs of `bench/overload.py` and `bench/soak.py`. Speed is not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def run_bench(name: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCH / name), "--json", *options]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_bench_overload_short_run_rejects_calls_and_loses_none() -> None:
    metrics = run_bench("overload.py", "--only", "engine", "--seconds", "4")
    assert {"reject_ms", "peak_share", "recovery_s"} <= metrics.keys()
    assert metrics["scenarios"]["engine"]["rejected"] > 0
    assert metrics["scenarios"]["engine"]["replies"] > 0
    assert [metrics[name] for name in ("lost", "no_retry_after", "failed")] == [0, 0, 0], metrics
    assert 0 < metrics["share"] < 0.05


@pytest.mark.timeout(300)
def test_bench_soak_short_run_swaps_weights_and_loses_no_reply() -> None:
    metrics = run_bench("soak.py", "--warm-up", "0.05", "--minutes", "0.15")
    assert {"rss_growth", "fd_growth"} <= metrics.keys()
    assert {"gateway", "engine-0", "trainer", "rollout", "supervisor"} <= metrics["processes"].keys()
    assert [metrics[name] for name in ("lost", "server_errors")] == [0, 0], metrics
    assert all(metrics[name] > 0 for name in ("replies", "swaps", "rewards", "kills")), metrics
