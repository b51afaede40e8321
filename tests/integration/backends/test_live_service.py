"""Tests that an agent learns from its live sessions through each service's SDK and a local server.

The trainer is killed, and samplers expire during the run, so versions are exported again.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from instar.store.sqlite import SqliteStore
from tests.integration.backends.command import PROTOCOLS, RunningService, run_server
from tests.integration.test_live_run import run_cli, use_agent
from tests.tiny import make_tiny_model
from tests.torture.run_process import RunProcess

RANK = 8
STEPS = 4
SAMPLER_TTL_SECONDS = 45.0
NAME = "live"
POLICY = f"{NAME}/learner"


@pytest.fixture(params=[*PROTOCOLS])
def service_name(request: pytest.FixtureRequest) -> str:
    return request.param


def make_config(folder: Path, model: Path, service: RunningService) -> dict[str, Any]:
    return {
        "name": NAME,
        "dir": str(folder / "run"),
        "seed": 3,
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu", "max_context": 512},
        "backend": {**service.make_backend_section(RANK), "sampler_ttl": SAMPLER_TTL_SECONDS},
        "data": "live",
        "agents": {"learner": {"mode": "learn"}, "watched": {}},
        "live": {"gate": {"mode": "manual"}, "window": {"idle": None, "daily_budget": 1_000_000}},
        "trainer": {"steps": STEPS, "groups_per_step": 2, "adam": {"lr": 1e-2}, "tensorboard": False},
    }


class LiveRunProcess(RunProcess):
    def list_versions(self) -> dict[int, tuple[str, float]]:
        """Return the sampler's path and expiry of each published version."""
        rows = self.query(
            "SELECT version, artifact_path, expires_at FROM policies WHERE policy_id = ? "
            "AND state = 'published'",
            POLICY,
        )
        return {version: (path, expires_at) for version, path, expires_at in rows}

    def read_versions(self, request_id: str) -> set[int]:
        """Return the versions that answered a request."""

        async def read() -> set[int]:
            store = SqliteStore(self.run_dir / "store.db", read_only=True)
            (call,) = await store.calls_by_request(request_id)
            await store.close()
            return set(call.versions.tolist())

        return asyncio.run(read())

    def wait_for_version(self, version: int) -> None:
        def is_committed() -> bool:
            sql = "SELECT 1 FROM steps WHERE policy_id = ? AND version = ? AND state = 'committed'"
            return bool(self.query(sql, POLICY, version))

        assert self.wait_until(is_committed), self.collect_logs()

    def wait_for_renewal(self, version: int) -> None:
        previous = self.list_versions()[version]

        def is_renewed() -> bool:
            path, expires_at = self.list_versions()[version]
            return path != previous[0] and expires_at > previous[1]

        assert self.wait_until(is_renewed), self.collect_logs()


def request_reply(url: str, key: str) -> tuple[str, list[float]]:
    """Return the request id and the logprobs of a greedy reply."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    body |= {"temperature": 0, "logprobs": True}
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["id"], [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]


@pytest.mark.timeout(900)
def test_live_learning_through_the_service_survives_a_kill_and_the_expiry_of_samplers(
    service_name: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", context=512)
    with run_server(service_name, str(model), tmp_path, "--dtype", "fp32", "--threads", "1") as service:
        run = LiveRunProcess(tmp_path, make_config(tmp_path, model, service))
        run.roles = ("engine", "gateway", "trainer", "gate")
        run.start(**service.environment)
        try:
            _learn_and_serve(run)
        finally:
            if not run.has_exited():
                run.kill_tree()
    assert service.key not in run.collect_logs()


def _learn_and_serve(run: LiveRunProcess) -> None:
    assert run.wait_until(run.is_ready), run.collect_logs()
    keys = {
        name: run_cli("keys", "create", run.run_dir, "--agent", *arguments)["key"]
        for name, arguments in {
            "agent": ("learner",),
            "feedback": ("learner", "--feedback"),
            "watched": ("watched",),
        }.items()
    }
    (url,) = run.query("SELECT url FROM endpoints WHERE role = 'gateway'")[0]

    def rate_sessions(*scores: float) -> None:
        for score in scores:
            use_agent(url, keys["agent"], keys["feedback"], score=score)

    def wait_for_reply_of(version: int, key: str = keys["agent"]) -> list[float]:
        """Request replies until the version answers, and return the logprobs."""
        deadline = time.monotonic() + 60
        while True:
            request_id, logprobs = request_reply(url, key)
            if run.read_versions(request_id) == {version}:
                return logprobs
            assert time.monotonic() < deadline, run.collect_logs()
            time.sleep(0.2)

    base_logprobs = wait_for_reply_of(0)
    rate_sessions(1.0, 0.0)
    run.wait_for_version(1)
    assert wait_for_reply_of(0) == pytest.approx(base_logprobs, abs=1e-4), "a candidate does not answer"
    evaluated = (
        "SELECT 1 FROM evaluation_items WHERE candidate_score IS NOT NULL AND incumbent_score IS NOT NULL"
    )
    assert run.wait_until(lambda: bool(run.query(evaluated))), run.collect_logs()
    assert run_cli("versions", "promote", run.run_dir, "--agent", "learner")["serving"] == 1
    logprobs = wait_for_reply_of(1)
    assert logprobs != pytest.approx(base_logprobs, abs=1e-4)
    first_expiry = run.list_versions()[1][1]

    assert run.kill_role("trainer")
    rate_sessions(0.0, 1.0)
    run.wait_for_version(2)
    run.wait_for_renewal(1)
    assert run.kill_role("trainer"), "it may be exporting the next version again"
    while time.time() < first_expiry + 2:
        assert wait_for_reply_of(1) == pytest.approx(logprobs, abs=1e-4)
        time.sleep(0.5)
    assert wait_for_reply_of(0, keys["watched"]) == pytest.approx(base_logprobs, abs=1e-4)

    run.wait_for_renewal(2)
    assert run_cli("versions", "promote", run.run_dir, "--agent", "learner")["serving"] == 2
    assert wait_for_reply_of(2) != pytest.approx(logprobs, abs=1e-4)
    assert run_cli("versions", "rollback", run.run_dir, "--agent", "learner")["source"] == 1
    assert wait_for_reply_of(3) == pytest.approx(logprobs, abs=1e-4)
    rate_sessions(1.0, 0.5)
    run.finish(180)  # step 3 loads the serving version, and step 4 trains on the last sessions
    parents = dict(run.query("SELECT version, parent FROM policies WHERE state = 'published'"))
    assert parents == {1: 0, 2: 1, 3: 1, 4: 3}
    sessions = "SELECT c.step, s.agent_id FROM claims c JOIN sessions s USING (session_id) "
    trained = run.query(f"{sessions} WHERE c.epoch = 0 AND s.channel = 'live' AND c.outcome = 'trained'")
    assert sorted(trained) == [(step, "learner") for step in (1, 1, 2, 2, 4, 4)]
