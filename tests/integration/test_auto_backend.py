"""Tests for runs with `backend: auto` and a service configured by environment variables, and for resuming a
run with a different backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny_model
from tests.torture.run_process import ROOT, RunProcess, make_config

COMMAND = [sys.executable, "-m", "instar.cli.main"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


@pytest.fixture(scope="module")
def weaver(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a Weaver server and yield the URL and key that it prints."""
    folder = str(tmp_path_factory.mktemp("served"))
    args = ["backends", "serve", "--protocol", "weaver", "--model", str(model), "--dtype", "fp32"]
    server = subprocess.Popen(
        [*COMMAND, *args, "--dir", folder, "--json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    with server:
        yield json.loads(server.stdout.readline())
        server.terminate()
        server.wait(30)


@pytest.mark.timeout(300)
def test_run_with_auto_backend_finds_service_and_reports_loss_fallback(
    model: Path, weaver: dict[str, str], tmp_path: Path
) -> None:
    config: dict[str, Any] = make_config(tmp_path, model, steps=2)
    config["backend"] = {"type": "auto", "rank": 4}
    config["trainer"] |= {"loss": {"name": "ppo"}, "loss_fallback": "importance_sampling"}
    run = RunProcess(tmp_path, config)
    run.start(WEAVER_API_KEY=weaver["api_key"], WEAVER_BASE_URL=weaver["url"])
    run.finish(240)
    output = run.output.read_text()
    assert output.startswith("backend: weaver (WEAVER_API_KEY and WEAVER_BASE_URL in the environment)")
    (warning,) = json.loads(output.splitlines()[-1])["warnings"]
    assert "training with importance_sampling" in warning
    assert warning in (run.run_dir / "logs" / "trainer.log").read_text()
    assert warning in (run.run_dir / "report" / "index.html").read_text()
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert [path for path in files if weaver["api_key"].encode() in path.read_bytes()] == []


@pytest.mark.timeout(60)
def test_resume_with_a_different_backend_is_rejected(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model, steps=1)
    run = RunProcess(tmp_path, config)
    run.run_dir.mkdir()
    recorded_config = {**config, "backend": {"type": "weaver"}, "engine": {"type": "scripted"}}
    (run.run_dir / "config.json").write_text(json.dumps(recorded_config))
    run.start(resume=True)
    assert run.wait(50) == 1
    assert "this run was trained by weaver, but the setting now resolves to local" in run.output.read_text()
