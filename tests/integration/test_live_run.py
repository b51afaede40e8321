"""Tests `instar train` on live traffic, with real processes and a trainer that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tiny import make_tiny_model
from tests.torture.run_process import ROOT, RunProcess, make_config

STEPS = 3


def run_cli(*arguments: object) -> Any:
    completed = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", *map(str, arguments), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def use_agent(url: str, agent_key: str, feedback_key: str, score: float) -> None:
    """Open a live session, request a reply, end the session and rate it."""
    with httpx.Client(base_url=url, timeout=30) as client:
        headers = {"Authorization": f"Bearer {agent_key}"}
        session = client.post("/sessions", json={}, headers=headers).raise_for_status().json()
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
        session_path = f"/sessions/{session['session_id']}"
        client.post(f"{session_path}/complete", json={}, headers=headers).raise_for_status()
        headers = {"Authorization": f"Bearer {feedback_key}"}
        feedback = {"session_id": session["session_id"], "score": score}
        client.post("/feedback", json=feedback, headers=headers).raise_for_status()


@pytest.mark.timeout(400)
def test_live_run_serves_only_promoted_versions_and_trains_once_despite_a_kill(tmp_path: Path) -> None:
    config = make_config(tmp_path, make_tiny_model(tmp_path / "model"), steps=STEPS)
    del config["rollout"], config["reward"]
    config |= {"data": "live", "agents": {"learner": {"mode": "learn"}}}
    run = RunProcess(tmp_path, config)
    run.roles = ("engine", "gateway", "trainer")
    run.start()
    assert run.wait_until(run.is_ready), run.collect_logs()
    users = {
        agent: [
            run_cli("keys", "create", run.run_dir, "--agent", agent, *options)["key"]
            for options in ((), ("--feedback",))
        ]
        for agent in ("learner", "watched")
    }
    (url,) = run.query("SELECT url FROM endpoints WHERE role = 'gateway'")[0]
    use_agent(url, *users["watched"], score=1.0)
    for score in (1.0, 0.0):
        use_agent(url, *users["learner"], score=score)
    assert run.wait_until(lambda: run.count_committed_steps() == 1), run.collect_logs()
    assert run_cli("versions", "promote", run.run_dir) == {"serving": 1}
    assert run.kill_role("trainer")
    for score in (0.0, 1.0):
        use_agent(url, *users["learner"], score=score)
    assert run.wait_until(lambda: run.count_committed_steps() == 2), run.collect_logs()
    versions = run_cli("versions", "ls", run.run_dir)
    assert {row["version"]: row["stage"] for row in versions if row["is_served"]} == {1: "serving"}
    use_agent(url, *users["learner"], score=0.0)
    use_agent(url, *users["learner"], score=0.5)
    run.finish()
    trained = run.query(
        "SELECT c.step, s.agent_id FROM claims c JOIN sessions s USING (session_id) "
        "WHERE c.epoch = 0 AND s.channel = 'live' ORDER BY c.step"  # without replayed replies
    )
    assert trained == [(step, "learner") for step in (1, 1, 2, 2, 3, 3)]
    served = run.query(
        "SELECT c.versions FROM calls c JOIN sessions s USING (session_id) "
        "WHERE s.agent_id = 'learner' ORDER BY c.seq"
    )
    last_version = int.from_bytes(served[-1][0][:4], "little")
    assert last_version == 1, "the engine must serve the promoted version, not the newest"
    stages = run.query("SELECT stage FROM policies WHERE state = 'published' ORDER BY version")
    assert stages == [("serving",), ("candidate",), ("candidate",)]
