"""Tests for model names that select a version of the run's policy."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.types import Artifact, Policy
from tests.unit.gateway.conftest import RunningGateway, StartGateway

PATHS_AND_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/generate", {"prompt_ids": [5, 6, 7]}),
]


@pytest.fixture
async def gateway(start_gateway: StartGateway, model: ModelConfig) -> RunningGateway:
    """A gateway whose engine serves version 2 and has kept version 1."""
    engine = ScriptedEngine(model, ScriptedEngineConfig(replies=["some words"]))
    await engine.load(Policy("policy", 1, Artifact("base")))
    await engine.load(Policy("policy", 2, Artifact("base")))
    return await start_gateway(engine)


async def call(gateway: RunningGateway, path: str, body: dict[str, Any], model: str) -> httpx.Response:
    session = await gateway.open_session()
    response = await gateway.post_json(f"/s/{session.session_id}{path}", {**body, "model": model})
    if response.status_code == 200:
        (recorded,) = await gateway.calls(session)
        assert len(recorded.versions)
        response.extensions["versions"] = set(recorded.versions.tolist())
    return response


@pytest.mark.parametrize(("path", "body"), PATHS_AND_BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_model_name_with_a_version_samples_from_that_version(
    gateway: RunningGateway, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = {**body, "stream": stream}
    for model, version in (("policy@1", 1), ("policy@0", 0), ("policy@2", 2), ("policy", 2), ("other@1", 2)):
        response = await call(gateway, path, body, model)
        assert response.status_code == 200, response.text
        assert response.extensions["versions"] == {version}


@pytest.mark.parametrize(("path", "body"), PATHS_AND_BODIES)
async def test_unknown_version_returns_404_with_the_versions_that_exist(
    gateway: RunningGateway, path: str, body: dict[str, Any]
) -> None:
    for stream in (False, True):
        response = await call(gateway, path, {**body, "stream": stream}, "policy@3")
        assert response.status_code == 404
        assert "does not have policy@3; it has policy@0, policy@1, policy@2." in response.text
    for version in ("latest", "", "-1", "1.0", "1" * 30):
        response = await call(gateway, path, body, f"policy@{version}")
        assert response.status_code == 404
        assert "must be a number, for example policy@3" in response.text


async def test_echo_of_a_named_version_is_rejected(gateway: RunningGateway) -> None:
    body = {"prompt": "hi", "echo": True, "max_tokens": 0, "logprobs": 0}
    response = await call(gateway, "/v1/completions", body, "policy@1")
    assert response.status_code == 400
    assert "'echo' is only supported for the served version" in response.text


async def test_requests_for_versions_in_one_session_record_the_version_of_each_token(
    gateway: RunningGateway,
) -> None:
    """A session is not bound to a version."""
    session = await gateway.open_session()
    for model in ("policy@1", "policy@2", "policy@1"):
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        response = await gateway.post_json(f"/s/{session.session_id}/v1/chat/completions", body)
        assert response.status_code == 200
    versions = [set(call.versions.tolist()) for call in await gateway.calls(session)]
    assert versions == [{1}, {2}, {1}]
