"""Check the authorization matrix in docs/security.md against a running gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from instar.cli.reference import create_app_without_engine
from instar.config import GroupsConfig, RunConfig
from instar.gateway.auth import create_key
from instar.gateway.base import GroupView, OpenedSession
from instar.registry import list_names, resolve
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import build_request, post

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
CHAT_BODY = build_request("chat", "hello")
SUBMITTED_CALL = {
    "prompt_ids": [1, 2],
    "sampled_ids": [3],
    "logprobs": [-1.0],
    "versions": [0],
    "finish_reason": "stop",
}
MODEL_BODIES = {
    "chat/completions": CHAT_BODY,
    "completions": build_request("completions", "hello"),
    "messages": build_request("messages", "hello"),
    "messages/count_tokens": {"model": "m", "messages": CHAT_BODY["messages"]},
    "responses": build_request("responses", "hello"),
    "responses/input_tokens": build_request("responses", "hello"),
    "generate": {},
}
FIELD_VALUES: dict[str, Any] = {
    "channel": "train",
    "group_id": "run/train/000000",
    "slot": 1,
    "attempt": 999,
    "task": {"answer": "hello"},
    "metadata.task": {"answer": "hello"},
    "reward": 1.0,
    "rewards": [{"value": 1.0, "source": "rule"}],
    "scores": [{"scorer": "rule", "state": "scored"}],
    "echo": True,
}
"""Values for the request fields that the matrix names."""


def read_tables() -> list[dict[str, dict[str, str]]]:
    """Return the page's tables. ``table[row][column]`` is the text of a cell."""
    tables: list[dict[str, dict[str, str]]] = []
    section = PAGE.read_text().split("## Authorization matrix")[1].split("\n## ")[0]
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.splitlines()]
        header, rows = lines[0][1:], lines[2:]
        tables.append({row[0]: dict(zip(header, row[1:], strict=True)) for row in rows})
    return tables


KEY_TABLE, OWNER_TABLE, EFFECT_TABLE = read_tables()


@dataclass(frozen=True)
class TargetSession:
    """A session with one call, and the ids that requests in the matrix refer to."""

    session: OpenedSession
    call_id: str
    response_id: str
    item_id: str
    prompt_ids: list[int]


async def open_group(gateway: RunningGateway) -> GroupView:
    response = await gateway.post_json("/groups", {"task": {}, "size": 2})
    assert response.status_code == 201, response.text
    return msgspec.json.decode(response.content, type=GroupView)


async def open_target(gateway: RunningGateway, key: str = ADMIN_KEY, **fields: Any) -> TargetSession:
    opened = await gateway.post_json("/sessions", fields, key)
    assert opened.status_code == 201, opened.text
    session = OpenedSession(**opened.json())
    response = await post(gateway, build_request("responses", "hi"), "responses", session.api_key)
    assert response.status_code == 200, response.text
    (call,) = await gateway.calls(session)
    item_id = response.json()["output"][0]["id"]
    return TargetSession(session, call.call_id, response.json()["id"], item_id, call.prompt_ids.tolist())


async def prepare_cell(gateway: RunningGateway, column: str) -> tuple[str | None, TargetSession]:
    """Return the key for a column, and a new target session with the owner that the column names."""
    key_type, _, owner = column.partition(", ")
    other_key = await create_key(gateway.store, "agent", "other")
    channel = {"channel": "train"} if owner == "rollout" else {}
    is_opened_by_other = key_type in ("agent", "feedback") and owner == "other"
    target = await open_target(gateway, other_key if is_opened_by_other else ADMIN_KEY, **channel)
    match key_type:
        case "no key":
            return None, target
        case "admin":
            return ADMIN_KEY, target
        case "session":
            key_session = target if owner != "other" else await open_target(gateway)
            return key_session.session.api_key, target
        case "agent":
            return await create_key(gateway.store, "agent", "agent"), target
        case "feedback":
            agent_id = None if owner == "all" else "agent"
            return await create_key(gateway.store, "feedback", agent_id), target
        case _:
            raise AssertionError(f"unknown column {column!r}")


def build_row_request(
    row: str, target: TargetSession
) -> tuple[str, str, dict[str, Any] | None, dict[str, str]]:
    """Return the method, path, body and headers of the request that a row describes."""
    parts = re.findall("`([^`]+)`", row)
    method, path = parts[0].split(" ")
    field = parts[1] if len(parts) > 1 else None
    session_id = target.session.session_id
    headers: dict[str, str] = {}
    ids = {
        "session_id": session_id,
        "call_id": target.call_id,
        "response_id": target.response_id,
        "previous_response_id": target.response_id,
    }
    body: dict[str, Any] | None = None
    route = path.removeprefix("/s/{session}").removeprefix("/v1/")
    if route in MODEL_BODIES:
        body = MODEL_BODIES[route] | ({"prompt_ids": target.prompt_ids} if route == "generate" else {})
    elif route.endswith("/calls"):
        body = {"calls": [SUBMITTED_CALL]}
    elif route.endswith("feedback") and method == "POST":
        body = {"thumbs": "up"} if "/s/" in path or field in ids else {"session_id": session_id}
    elif method == "POST":
        body = {"reason": "failed"} if route.endswith("/fail") else {}
        body |= {"task": {}, "size": 2} if route == "/groups" else {}
    if field == "x-instar-session":
        headers[field] = session_id
    elif field == "item_reference":
        assert body is not None
        first, second = ({"role": "user", "content": text} for text in ("hi", "go on"))
        body |= {"input": [first, {"type": field, "id": target.item_id}, second]}
    elif field is not None:
        assert body is not None
        value = 10.5 if "out of range" in row else ids.get(field) or FIELD_VALUES[field]
        name, _, key = field.partition(".")
        body |= {name: {key: value} if key else value} | (
            {"max_tokens": 0, "logprobs": 0} if field == "echo" else {}
        )
    path = (
        path.replace("{session}", session_id)
        .replace("{model}", "default")
        .replace("{response}", target.response_id)
    )
    return method, path, body, headers


async def send_cell_request(gateway: RunningGateway, row: str, column: str) -> tuple[str, str]:
    """Send a cell's request. Return "yes" or the error status, and the response text."""
    key, target = await prepare_cell(gateway, column)
    method, path, body, headers = build_row_request(row, target)
    if "{group}" in path:
        group = await open_group(gateway)
        path = path.replace("{group}", group.group_id)
        key = group.slots[0].api_key if column == "session" else key
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    response = await gateway.http.request(method, path, json=body, headers=headers)
    if row in OWNER_TABLE and response.is_success:
        session_id = target.session.session_id
        assert response.headers.get("x-instar-session", session_id) == session_id, (
            "the call was recorded in a different session"
        )
    return ("yes" if response.is_success else str(response.status_code)), response.text


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> RunningGateway:
    """A gateway that accepts groups from outside."""
    return await start_gateway(run_config=RunConfig(groups=GroupsConfig()))


@pytest.mark.parametrize("row", [*KEY_TABLE, *OWNER_TABLE])
async def test_route_responds_to_each_key_as_documented(gateway: RunningGateway, row: str) -> None:
    expected = KEY_TABLE.get(row) or OWNER_TABLE[row]
    actual = {column: await send_cell_request(gateway, row, column) for column in expected}
    assert {column: cell for column, (cell, _) in actual.items()} == expected, actual


async def test_matrix_contains_every_route() -> None:
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
    documented = {re.findall("`([^`]+)`", row)[0] for row in (*KEY_TABLE, *OWNER_TABLE)}
    assert documented == routes


@pytest.mark.parametrize("key_type", EFFECT_TABLE)
async def test_feedback_has_the_documented_effects(gateway: RunningGateway, key_type: str) -> None:
    for owner in ("own",) if key_type == "agent" else ("own", "rollout"):
        key, target = await prepare_cell(gateway, f"{key_type}, {owner}")
        assert key is not None
        body = {"session_id": target.session.session_id, "score": 1.0, "correction": "Better."}
        response = await gateway.post_json("/feedback", body, key)
        assert response.status_code == 201, response.text
        (reward,) = await gateway.store.rewards(target.session.session_id)
        assert list(EFFECT_TABLE[key_type].values()) == [
            reward.source.value,
            "yes" if response.json()["trainable"] else "no",
        ], owner
