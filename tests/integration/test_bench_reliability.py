"""Short samples of `bench/overload.py` and `bench/soak.py`; the speed of the machine is not tested here."""

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
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_bench_overload_short_sample_rejects_calls_and_loses_none() -> None:
    figures = run_bench("overload.py", "--only", "engine", "--seconds", "4")
    assert {"reject_ms", "peak_share", "recovery_s"} <= figures.keys()
    assert figures["scenarios"]["engine"]["rejected"] > 0
    assert figures["scenarios"]["engine"]["replies"] > 0
    assert [figures[name] for name in ("lost", "no_retry_after", "failed")] == [0, 0, 0], figures
    assert 0 < figures["share"] < 0.05


@pytest.mark.timeout(300)
def test_bench_soak_short_sample_swaps_weights_and_loses_no_reply() -> None:
    figures = run_bench("soak.py", "--warm-up", "0.05", "--minutes", "0.15")
    assert {"rss_growth", "fd_growth"} <= figures.keys()
    assert {"gateway", "engine-0", "trainer", "rollout", "supervisor"} <= figures["processes"].keys()
    assert [figures[name] for name in ("lost", "server_errors")] == [0, 0], figures
    assert all(figures[name] > 0 for name in ("replies", "swaps", "rewards", "kills")), figures
