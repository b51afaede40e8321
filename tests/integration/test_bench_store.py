"""`bench/store.py` runs, on a store that is small, and ends with its figures. How fast is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_store_is_measured(tmp_path: Path) -> None:
    bench = str(ROOT / "bench" / "store.py")
    command = [sys.executable, bench, "--json", "--calls", "10000", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=280, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {"ratio_raw", "ratio_heap", "page_ms", "batch_s"} <= set(figures)
    assert all(figures[name] > 0 for name in ("ratio_raw", "ratio_heap", "page_ms", "batch_s"))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
