"""`bench/store.py` runs on a small store and prints its figures; speed is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_bench_store_on_small_store_reports_every_figure(tmp_path: Path) -> None:
    bench = str(ROOT / "bench" / "store.py")
    command = [sys.executable, bench, "--json", "--calls", "10000", "--rounds", "1"]
    completed = subprocess.run(
        [*command, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=280, cwd=ROOT, check=False
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    figures = json.loads(completed.stdout.splitlines()[-1])
    assert {"ratio_raw", "ratio_heap", "page_ms", "batch_s"} <= set(figures)
    assert all(figures[name] > 0 for name in ("ratio_raw", "ratio_heap", "page_ms", "batch_s"))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
