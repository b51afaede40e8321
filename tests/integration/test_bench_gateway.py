"""Test of a complete run of `bench/gateway.py --quick`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.skipif(
    not (shutil.which("wrk") and Path("/usr/lib/nginx/modules/ngx_http_lua_module.so").is_file()),
    reason="needs wrk, and nginx with Lua: apt-get install nginx libnginx-mod-http-lua wrk",
)
@pytest.mark.timeout(300)
def test_bench_gateway_quick_run_reports_every_metric() -> None:
    command = [sys.executable, str(BENCH / "gateway.py"), "--quick", "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert completed.returncode == 0, completed.stderr
    metrics = json.loads(completed.stdout.splitlines()[-1])
    assert metrics["failed"] == {}, completed.stderr
    assert metrics["ratio_litellm"] is None  # no peer was requested
    for name in ("share_of_floor", "turn_100_over_10", "rss_mb", "loop_lag_p99_ms"):
        assert metrics[name] > 0, completed.stderr
