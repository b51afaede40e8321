"""Test of a short run of `bench/fuzz.py`: the gateway must respond to every request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_fuzzed_gateway_has_no_server_errors_and_no_hangs(tmp_path: Path) -> None:
    failures = tmp_path / "failures.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "fuzz.py"), "--json", "--no-schema", "--requests", "4000"]
    # The memory and latency limits are for long runs on an idle machine, so the exit code is not checked.
    completed = subprocess.run(
        [*command, "--seed", "2", "--failures", str(failures)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        check=False,
    )
    assert completed.stdout, completed.stderr[-3000:]
    metrics = json.loads(completed.stdout.splitlines()[-1])
    assert metrics["requests"] >= 4000
    assert (metrics["server_errors"], metrics["hangs"]) == (0, 0), failures.read_text()[:5000]
    assert {"share", "rss_growth", "bystander_ratio"} <= set(metrics)
    assert {"200", "400", "401", "404"} <= set(metrics["statuses"])
