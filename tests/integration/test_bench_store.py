"""Test of `bench/store.py` on a small store. Speed is not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_bench_store_on_small_store_reports_every_metric(tmp_path: Path) -> None:
    bench = str(ROOT / "bench" / "store.py")
    command = [sys.executable, bench, "--json", "--calls", "10000", "--rounds", "1"]
    completed = subprocess.run(
        [*command, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=280, cwd=ROOT, check=False
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    metrics = json.loads(completed.stdout.splitlines()[-1])
    assert {"ratio_raw", "ratio_heap", "counter_overhead", "page_ms", "batch_s"} <= set(metrics)
    assert all(metrics[name] > 0 for name in ("ratio_raw", "ratio_heap", "page_ms", "batch_s"))
    assert list(tmp_path.iterdir()) == [], "files were left behind"
