"""Every role of a run drained, stopped and started again alone, while the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny_model
from tests.torture.tortured import ROOT, Tortured, settings


def roles(run: Tortured, *arguments: str) -> dict[str, dict[str, Any]]:
    """`instar roles`, by name."""
    command = [sys.executable, "-m", "instar.cli.main", "roles", str(run.run_dir), *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{run.explain()}"
    return {row["name"]: row for row in json.loads(done.stdout)}


def committed(run: Tortured) -> int:
    return run.query("SELECT COUNT(*) FROM steps WHERE state = 'committed'")[0][0]


def goes_on(run: Tortured) -> None:
    """Two further steps: one may have been under way."""
    before = committed(run)
    assert run.wait_until(lambda: committed(run) >= before + 2)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Tortured]:
    model = make_tiny_model(tmp_path / "model", hidden=32, context=2048)
    config = settings(tmp_path, model, steps=1000, mode="async", max_staleness=2, checkpoint_every=5)
    config["engine"]["count"] = 2
    made = Tortured(tmp_path, config)
    made.start()
    yield made
    if not made.is_over():
        made.kill()
    made.assert_no_orphans()


@pytest.mark.timeout(400)
def test_every_role_alone(run: Tortured) -> None:
    assert run.wait_until(lambda: run.run_dir.joinpath("store.db").exists() and run.is_up(), 180)
    goes_on(run)

    listed = roles(run)
    assert {row["state"] for row in listed.values()} == {"running"}
    assert set(listed) == {"engine-0", "engine-1", "gateway", "trainer", "rollout"}
    assert set(run.processes()) == {row["pid"] for row in listed.values()}
    assert all(Path(row["log"]).is_file() for row in listed.values())

    for name in ("engine-0", "gateway", "rollout", "trainer"):
        after = roles(run, "restart", name)
        assert after[name]["state"] == "running"
        goes_on(run)
        assert roles(run)[name]["pid"] != listed[name]["pid"], f"{name} is another process"

    os.kill(roles(run)["trainer"]["pid"], signal.SIGTERM)
    goes_on(run)  # nobody of the run asked for that end

    assert roles(run, "drain", "engine-1")["engine-1"]["state"] == "stopped"
    goes_on(run)
    assert roles(run, "start", "engine-1")["engine-1"]["state"] == "running"

    assert roles(run, "drain", "trainer")["trainer"]["state"] == "stopped"
    saved = run.query("SELECT MAX(step) FROM steps WHERE state = 'committed'")
    assert saved == run.query("SELECT MAX(step) FROM steps"), "the step under way was finished and saved"
    assert roles(run, "start", "trainer")["trainer"]["state"] == "running"
    goes_on(run)

    ends = ("failed", "abandoned")
    lost = run.query("SELECT status, reason FROM sessions WHERE status IN (?, ?)", *ends)
    assert lost == [], f"draining costs no session\n{run.explain()}"
    assert run.process is not None
    run.process.terminate()
    assert run.wait(120) == 130, run.explain()
    run.assert_no_orphans()
    run.assert_recorded()
    twice = run.query("SELECT sample_key FROM claims GROUP BY run_id, epoch, sample_key HAVING COUNT(*) > 1")
    assert twice == []
    assert {row["state"] for row in roles(run).values()} == {"down"}
