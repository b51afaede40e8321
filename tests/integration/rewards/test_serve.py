"""Tests that `instar serve` scores live sessions when they complete, and rejects an unknown scorer name."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from instar.rewards.base import Transcript
from tests.tiny import make_tiny_model

ROOT = Path(__file__).parents[3]


def score_length(task: dict[str, Any], transcript: Transcript) -> float:
    return float(len(transcript.final_text) > 1)


def make_settings(tmp_path: Path) -> dict[str, Any]:
    model = make_tiny_model(tmp_path / "model", hidden=32, context=2048)
    return {
        "name": "live",
        "dir": str(tmp_path / "run"),
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu"},
        "engine": {"type": "scripted", "function": "tests.integration.scripted_replies:reply"},
        "reward": [{"type": "agent"}, {"type": "rule", "function": f"{__name__}:score_length"}],
    }


def start_server(tmp_path: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
    config_path = tmp_path / "run.yaml"
    config_path.write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        [sys.executable, "-m", "instar.cli.main", "serve", str(config_path), "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


@pytest.mark.timeout(120)
def test_serve_scores_live_sessions_when_they_complete(tmp_path: Path) -> None:
    with start_server(tmp_path, make_settings(tmp_path)) as process:
        try:
            assert process.stdout is not None
            connection_info = json.loads(process.stdout.readline())
            url = connection_info["base_url"].removesuffix("/v1")
            session = post(f"{url}/sessions", connection_info["api_key"], {})
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            post(f"{session['base_url']}/chat/completions", session["api_key"], body)
            post(f"{url}/sessions/{session['session_id']}/complete", session["api_key"], {"reward": 0.25})
            store = sqlite3.connect(f"file:{tmp_path / 'run' / 'store.db'}?mode=ro", uri=True)
            deadline = time.monotonic() + 30
            while not (rows := store.execute("SELECT scorer, state FROM scores").fetchall()):
                assert time.monotonic() < deadline, "the session was not scored"
                time.sleep(0.1)
            assert rows == [(f"{__name__}:score_length", "scored")]
            rewards = store.execute("SELECT value, source FROM rewards ORDER BY seq").fetchall()
            assert [source for _, source in rewards] == ["agent", "rule"]
            reward_roles = store.execute("SELECT name FROM endpoints WHERE role = 'rewards'").fetchall()
            assert len(reward_roles) == 1
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@pytest.mark.timeout(60)
def test_serve_rejects_unknown_scorer_name_at_start(tmp_path: Path) -> None:
    config = make_settings(tmp_path) | {"scoring": {"combine": {"weights": {"missing": 1.0}}}}
    with start_server(tmp_path, config) as process:
        _, stderr = process.communicate(timeout=50)
    assert process.returncode == 1
    assert "scoring.combine.weights: unknown scorer 'missing'" in stderr
    assert "Traceback" not in stderr
