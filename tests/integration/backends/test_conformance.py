"""`instar backends check`, as a user runs it, for every backend."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.backends.environments import ROOT, get_interpreter

OWN_ENVIRONMENT = ("mint", "verl")


@pytest.mark.timeout(1200)  # an environment may have to be made first
@pytest.mark.parametrize("name", ["local", "tinker", "weaver", "mint", "verl"])
def test_backend_agrees_with_the_local_backend(name: str) -> None:
    *checks, summary = check(name)
    assert summary == {"backend": name, "passed": len(checks), "failed": 0}
    assert any("weights after five steps" in each["name"] and "at most" in each["detail"] for each in checks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["tinker"])
def test_backend_agrees_with_the_local_backend_in_bf16(name: str) -> None:
    *_, summary = check(name, "--dtype", "bf16")
    assert summary["failed"] == 0


def check(name: str, *options: str) -> list[dict[str, Any]]:
    python = ["--python", str(get_interpreter(name))] if name in OWN_ENVIRONMENT else []
    done = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", "backends", "check", name, "--json", *python, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [line for line in lines if line.get("passed") is False]
    return lines
