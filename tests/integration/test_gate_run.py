"""Tests `instar train` on live traffic with a gate that promotes and rejects candidates without a person."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from instar.types import Message
from tests.integration.test_live_run import run_cli
from tests.tiny import make_tiny_model
from tests.torture.run_process import RunProcess, make_config
from tests.unit.live.prompts import list_prompts

HELD_OUT = 25


def use_agent(client: httpx.Client, key: str, messages: list[Message]) -> None:
    """Open a live session, request a reply and end the session. The rule scores it."""
    headers = {"Authorization": f"Bearer {key}"}
    session = client.post("/sessions", json={}, headers=headers).raise_for_status().json()
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    body = {"model": "m", "messages": messages, "max_tokens": 8}
    client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
    client.post(f"/sessions/{session['session_id']}/complete", json={}, headers=headers).raise_for_status()


def read_stages(run: RunProcess) -> dict[int, str]:
    return dict(run.query("SELECT version, stage FROM policies WHERE state = 'published' ORDER BY version"))


@pytest.mark.timeout(600)
def test_gate_promotes_a_better_and_rejects_a_worse_candidate_despite_kills(tmp_path: Path) -> None:
    config: dict[str, Any] = make_config(tmp_path, make_tiny_model(tmp_path / "model"), steps=4)
    del config["rollout"]
    config["engine"] |= {"function": "tests.integration.gate_replies:reply", "delay": 0.0}
    config |= {
        "data": "live",
        "agents": {"learner": {"mode": "learn"}},
        "reward": {"type": "rule", "function": "tests.integration.gate_replies:score"},
        "live": {
            "gate": {"min_prompts": 20, "concurrency": 8},
            "canary": {"shadow_days": 1e-6, "days": 1e-6},
        },
    }
    run = RunProcess(tmp_path, config)
    run.roles = ("engine", "gateway", "trainer", "rewards", "gate")
    run.start()
    assert run.wait_until(run.is_ready), run.collect_logs()
    key = run_cli("keys", "create", run.run_dir, "--agent", "learner")["key"]
    (url,) = run.query("SELECT url FROM endpoints WHERE role = 'gateway'")[0]
    trained = islice(list_prompts(held_out=False), 6)
    with httpx.Client(base_url=url, timeout=60) as client:
        for messages in islice(list_prompts(), HELD_OUT):
            use_agent(client, key, messages)

        def train_step() -> None:
            for messages in islice(trained, 2):
                use_agent(client, key, messages)

        train_step()
        count = "SELECT COUNT(*) FROM evaluation_items WHERE version = 1"
        assert run.wait_until(lambda: run.query(count)[0][0] > 10), run.collect_logs()
        assert run.kill_role("gate")
        assert run.wait_until(lambda: read_stages(run).get(1) == "serving", 200), run.collect_logs()
        train_step()
        assert run.wait_until(lambda: read_stages(run).get(2) == "rejected", 200), run.collect_logs()
        # Step 3 loads version 1 again, and step 4 trains on the last sessions.
        assert run.wait_until(lambda: run.count_committed_steps() == 3), run.collect_logs()
        train_step()
        run.finish()
    assert read_stages(run)[1] == "serving"
    parents = dict(run.query("SELECT version, parent FROM policies WHERE state = 'published'"))
    assert parents == {1: 0, 2: 1, 3: 1}
    live_claims = "FROM claims JOIN sessions USING (session_id) WHERE channel = 'live' AND epoch = 0"
    claims = run.query(f"SELECT session_id, step, outcome, claims.reason {live_claims}")  # without replays
    assert len({row[0] for row in claims}) == len(claims), "a session was claimed twice"
    assert [row[3] for row in claims if row[2] == "dropped"] == ["held_out"] * HELD_OUT
    assert sorted(row[1] for row in claims if row[2] == "trained") == [1, 1, 2, 2, 4, 4]
    shown = run_cli("versions", "show", run.run_dir, "2")
    assert shown["evaluation"]["decision"] == "reject"
    assert {claim["rejected_version"] for claim in shown["trained_on"]} == {2}
    others = "SELECT 1 FROM sessions WHERE channel != 'live' AND group_id NOT LIKE '%/data/base/%'"
    assert not run.query(others), "the evaluation records nothing"
