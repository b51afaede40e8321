"""Test of `bench/fidelity.py` with two clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "fidelity.py"


@pytest.mark.timeout(600)  # the clients may have to be installed first
def test_bench_fidelity_with_two_clients_reports_full_fidelity() -> None:
    command = [
        sys.executable,
        str(BENCH),
        "--json",
        "--clients",
        "anthropic,mini_swe",
        "--families",
        "SmolLM2",
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    metrics = json.loads(completed.stdout.splitlines()[-1])
    assert [metrics[name] for name in ("linked", "exact_prefix", "trained")] == [1, 1, 1]
    measured_dialects = [(row["client"], row["dialect"]) for row in metrics["rows"]]
    assert measured_dialects == [
        ("anthropic", "messages"),
        *(("mini_swe", d) for d in ("chat", "responses", "messages")),
    ]
    assert all(row["counts"]["turns"] for row in metrics["rows"])
