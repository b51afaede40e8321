"""Tests for the list of models and for calls that request a version of the model."""

from __future__ import annotations

import pytest

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.base import EngineStatus
from instar.engines.scripted import ScriptedEngine
from instar.errors import EngineUnavailable
from instar.types import Artifact, Policy
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import DIALECTS, build_request, post

HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}


class UnresponsiveEngine(ScriptedEngine):
    async def status(self) -> EngineStatus:
        raise EngineUnavailable("The engine is restarting.")


async def list_models(gateway: RunningGateway, **headers: str) -> list[str]:
    response = await gateway.http.get("/v1/models", headers={**HEADERS, **headers})
    assert response.status_code == 200, response.text
    return [model["id"] for model in response.json()["data"]]


async def test_models_list_has_the_name_and_the_served_version(gateway: RunningGateway) -> None:
    assert gateway.engine is not None
    assert await list_models(gateway) == ["policy", "policy@0"]
    await gateway.engine.load(Policy("policy", 3, Artifact("base")))
    assert await list_models(gateway) == ["policy", "policy@3"]
    assert await list_models(gateway, **{"anthropic-version": "2023-06-01"}) == ["policy", "policy@3"]


async def test_models_list_without_a_responding_engine_has_only_the_name(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(UnresponsiveEngine(model, ScriptedEngineConfig()))
    assert await list_models(gateway) == ["policy"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_call_of_the_served_version_is_answered_and_of_another_one_rejected(
    gateway: RunningGateway, dialect: str
) -> None:
    assert gateway.engine is not None
    await gateway.engine.load(Policy("policy", 3, Artifact("base")))
    response = await post(gateway, build_request(dialect, "hi", model="policy@3"), dialect=dialect)
    assert response.status_code == 200, response.text
    for name, reason in (
        ("policy@2", "does not have policy@2; it has policy@0, policy@3."),
        ("policy@base", "must be a number"),
    ):
        response = await post(gateway, build_request(dialect, "hi", model=name), dialect=dialect)
        assert response.status_code == 404
        assert reason in response.text
        response = await gateway.http.get(f"/v1/models/{name}", headers=HEADERS)
        assert response.status_code == 404
    assert len(await gateway.store.sessions()) == 1, "a rejected call opens no session"
    response = await gateway.http.get("/v1/models/other@2", headers=HEADERS)
    assert response.json()["id"] == "other@2", "other names with @ are not versions"
