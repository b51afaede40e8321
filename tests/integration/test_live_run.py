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
    learners = ("learner", "second")
    config |= {"data": "live", "agents": {agent: {"mode": "learn"} for agent in learners}}
    run = RunProcess(tmp_path, config)
    run.roles = ("engine", "gateway", "trainer")
    run.start()
    assert run.wait_until(run.is_ready), run.collect_logs()
    users = {
        agent: [
            run_cli("keys", "create", run.run_dir, "--agent", agent, *options)["key"]
            for options in ((), ("--feedback",))
        ]
        for agent in (*learners, "watched")
    }
    (url,) = run.query("SELECT url FROM endpoints WHERE role = 'gateway'")[0]

    def use_learners(*scores: float) -> None:
        for agent in learners:
            for score in scores:
                use_agent(url, *users[agent], score=score)

    use_agent(url, *users["watched"], score=1.0)
    use_learners(1.0, 0.0)
    assert run.wait_until(lambda: run.count_committed_steps() == 2), run.collect_logs()
    name = config["name"]
    promoted = run_cli("versions", "promote", run.run_dir, "--agent", "learner")
    assert promoted == {"policy": f"{name}/learner", "serving": 1}
    assert run.kill_role("trainer")
    use_learners(0.0, 1.0)
    assert run.wait_until(lambda: run.count_committed_steps() == 4), run.collect_logs()
    versions = run_cli("versions", "ls", run.run_dir)
    served = {(row["policy"], row["version"]): row["stage"] for row in versions if row["is_served"]}
    assert served == {(f"{name}/learner", 1): "serving"}
    use_learners(0.0, 0.5)
    run.finish()
    trained = run.query(
        "SELECT c.policy_id, c.step, s.agent_id FROM claims c JOIN sessions s USING (session_id) "
        "WHERE c.epoch = 0 AND s.channel = 'live' ORDER BY c.policy_id, c.step"  # without replayed replies
    )
    expected = [(f"{name}/{agent}", step, agent) for agent in learners for step in (1, 1, 2, 2, 3, 3)]
    assert trained == expected
    stages = run.query(
        "SELECT policy_id, stage FROM policies WHERE state = 'published' ORDER BY policy_id, version"
    )
    assert stages == [
        (f"{name}/learner", "serving"),
        *[(f"{name}/learner", "candidate")] * 2,
        *[(f"{name}/second", "candidate")] * 3,
    ]
