"""Check the gateway's OpenAPI description against its routes, requests and responses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from instar.cli.reference import create_app_without_engine, render_api
from instar.registry import list_names, resolve
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway
from tests.unit.gateway.wire import PATHS, build_request, post

OPENAPI_FILE = Path(__file__).parents[3] / "docs" / "openapi.json"
SUBMITTED_CALL = {
    "prompt_ids": [1, 2],
    "sampled_ids": [3],
    "logprobs": [-1.0],
    "versions": [0],
    "finish_reason": "stop",
}
CONTROL_REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/healthz", None),
    ("GET", "/stats", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model}", None),
    ("GET", "/openapi.json", None),
    ("POST", "/sessions", {"metadata": {"a": 1}, "sampling": {"top_k": 1}}),
    ("POST", "/sessions/{session}/calls", {"calls": [SUBMITTED_CALL]}),
    ("POST", "/feedback", {"thumbs": "up"}),
    ("GET", "/feedback", None),
    ("GET", "/sessions/{session}", None),
    ("POST", "/sessions/{session}/complete", {"reward": 1.0}),
    ("POST", "/sessions/{session}/fail", {"reason": "failed"}),
]


def list_described_routes(description: dict[str, Any]) -> set[str]:
    return {f"{method.upper()} {path}" for path, item in description["paths"].items() for method in item}


def embed_components(schema: Any, description: dict[str, Any]) -> Any:
    """Return the schema with the component schemas as `$defs`, so that its references can be resolved."""
    text = json.dumps(schema).replace("#/components/schemas/", "#/$defs/")
    components = json.dumps(description["components"]["schemas"]).replace("#/components/schemas/", "#/$defs/")
    return {**json.loads(text), "$defs": json.loads(components)}


async def check_exchange(
    gateway: RunningGateway, method: str, path: str, body: Any, session_id: str = "", response_id: str = ""
) -> None:
    """Send the request, and validate it and its response against the description."""
    description = (await gateway.http.get("/openapi.json")).json()
    operation = description["paths"][path][method.lower()]
    if body is not None:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator(embed_components(schema, description)).validate(body)
    url = path.replace("{session}", session_id).replace("{model}", "default")
    url = url.replace("{response}", response_id)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    response = await gateway.http.request(method, url, json=body, headers=headers)
    assert response.is_success, response.text
    success = operation["responses"].get("2XX") or operation["responses"]["200"]
    schema = success["content"][response.headers["content-type"]]["schema"]
    Draft202012Validator(embed_components(schema, description)).validate(response.json())


async def test_description_lists_exactly_the_routes() -> None:
    app = await create_app_without_engine()
    routes = {
        f"{method} {route.path.replace(':path', '')}"
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    dialects = [resolve("dialects", name)() for name in list_names("dialects")]
    paths = [path for dialect in dialects for path in (dialect.path, dialect.count_path) if path]
    routes |= {f"POST {prefix}/v1{path}" for path in paths for prefix in ("", "/s/{session}")}
    assert list_described_routes(app.description) == routes


async def test_described_routes_exist_and_need_a_key_unless_public(gateway: RunningGateway) -> None:
    description = (await gateway.http.get("/openapi.json")).json()
    for route in list_described_routes(description):
        method, path = route.split(" ")
        response = await gateway.http.request(method, re.sub("{[a-z]+}", "x", path))
        is_public = description["paths"][path][method.lower()].get("security") == []
        assert response.status_code == (200 if is_public else 401), (route, response.text)


async def test_description_in_docs_is_current() -> None:
    assert OPENAPI_FILE.read_text() == await render_api(), "run `make docs`"


async def test_description_has_valid_schemas_references_and_operations() -> None:
    description = (await create_app_without_engine()).description
    for schema in description["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for reference in re.findall(r'"#/([^"]+)"', json.dumps(description)):
        target: Any = description
        for name in reference.split("/"):
            target = target[name]
    operations = [operation for item in description["paths"].values() for operation in item.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] for operation in operations)


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_model_call_matches_its_description(gateway: RunningGateway, dialect: str) -> None:
    body = build_request(dialect, "hello")
    await check_exchange(gateway, "POST", PATHS[dialect], body)
    count_paths = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}
    if dialect in count_paths:
        await check_exchange(gateway, "POST", count_paths[dialect], body)


async def test_stored_response_matches_its_description(gateway: RunningGateway) -> None:
    response = await post(gateway, build_request("responses", "hello"), "responses")
    for suffix in ("", "/input_items"):
        path = f"/v1/responses/{{response}}{suffix}"
        await check_exchange(gateway, "GET", path, None, response_id=response.json()["id"])


async def test_token_call_matches_its_description(gateway: RunningGateway) -> None:
    await check_exchange(gateway, "POST", "/v1/generate", {"prompt_ids": [1, 2, 3], "max_tokens": 4})


async def test_control_requests_match_their_descriptions(gateway: RunningGateway) -> None:
    session_id = (await gateway.open_session()).session_id
    for method, path, body in CONTROL_REQUESTS:
        fields = {**body, "session_id": session_id} if body and path == "/feedback" else body
        await check_exchange(gateway, method, path, fields, session_id)
