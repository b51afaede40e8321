"""Tests that `instar backends check`, run as a command, passes for every backend."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.backends.environments import ROOT, get_interpreter

BACKENDS_WITH_OWN_ENVIRONMENT = ("mint", "verl")


@pytest.mark.timeout(1200)  # an environment may have to be created first
@pytest.mark.parametrize("name", ["local", "tinker", "weaver", "mint", "verl"])
def test_backends_check_of_every_backend_passes(name: str) -> None:
    *checks, summary = run_checks(name)
    assert summary == {"backend": name, "passed": len(checks), "failed": 0}
    assert any(
        "weights after five steps" in check["name"] and "tolerance" in check["detail"] for check in checks
    )


@pytest.mark.timeout(300)
def test_backends_check_of_tinker_in_bf16_passes() -> None:
    *_, summary = run_checks("tinker", "--dtype", "bf16")
    assert summary["failed"] == 0


def run_checks(name: str, *options: str) -> list[dict[str, Any]]:
    """Run the checks and return the lines that the command prints: one per check, then the summary."""
    python = ["--python", str(get_interpreter(name))] if name in BACKENDS_WITH_OWN_ENVIRONMENT else []
    completed = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", "backends", "check", name, "--json", *python, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    lines = [json.loads(line) for line in completed.stdout.splitlines()]
    assert completed.returncode == 0, [line for line in lines if line.get("passed") is False]
    return lines
