"""API keys: their permissions, headers, caching and revocation, and the checks on the admin key."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from instar.errors import ConfigError, StoreError
from instar.gateway.auth import Authenticator, create_key, resolve_admin_key
from instar.gateway.base import ApiError
from instar.http.auth import hash_key
from instar.store.sqlite import SqliteStore
from instar.types import Channel, Session
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway

CHAT_BODY = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


def auth_headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def chat(gateway: RunningGateway, key: str, path: str = "/v1/chat/completions") -> httpx.Response:
    return await gateway.http.post(path, json=CHAT_BODY, headers=auth_headers(key))


async def test_agent_key_opens_uses_reads_and_completes_own_sessions(gateway: RunningGateway) -> None:
    key = await create_key(gateway.store, "agent", "coder")
    opened = await gateway.post_json("/sessions", {"channel": "live"}, key)
    assert opened.status_code == 201, opened.text
    session_id = opened.json()["session_id"]
    session = await gateway.store.session(session_id)
    assert session is not None
    assert session.agent_id == "coder"
    assert (await chat(gateway, key, f"/s/{session_id}/v1/chat/completions")).status_code == 200
    read = await gateway.http.get(f"/sessions/{session_id}", headers=auth_headers(key))
    assert (read.status_code, len(read.json()["calls"])) == (200, 1)
    completed = await gateway.post_json(f"/sessions/{session_id}/complete", {"reward": 1.0}, key)
    assert completed.status_code == 200, completed.text
    assert [reward.value for reward in await gateway.store.rewards(session_id)] == [1.0]


@pytest.mark.parametrize(
    "field", [{"group_id": "run/train/000000"}, {"slot": 1}, {"attempt": 999}, {"channel": "val"}]
)
async def test_agent_key_with_a_rollout_field_gets_an_error_that_names_it(
    gateway: RunningGateway, field: dict[str, Any]
) -> None:
    key = await create_key(gateway.store, "agent", "coder")
    (name,) = field
    response = await gateway.post_json("/sessions", field, key)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (403, name)
    assert f"'{name}'" in error["message"]
    assert "use an admin key" in error["message"]
    assert await gateway.store.sessions() == []


async def test_agent_key_cannot_use_sessions_of_other_agents(gateway: RunningGateway) -> None:
    key = await create_key(gateway.store, "agent", "coder")
    other = await gateway.open_session()
    for response in (
        await chat(gateway, key, f"/s/{other.session_id}/v1/chat/completions"),
        await gateway.http.get(f"/sessions/{other.session_id}", headers=auth_headers(key)),
        await gateway.post_json(f"/sessions/{other.session_id}/complete", {"reward": 9.0}, key),
        await gateway.post_json(f"/sessions/{other.session_id}/fail", {"reason": "x"}, key),
    ):
        assert response.status_code == 403, response.text
    assert await gateway.store.rewards(other.session_id) == []
    assert await gateway.store.calls(other.session_id) == []


async def test_agents_with_equal_content_have_different_sessions(gateway: RunningGateway) -> None:
    keys = [await create_key(gateway.store, "agent", name) for name in ("one", "two")]
    for key in keys:
        assert (await chat(gateway, key)).status_code == 200
    rows = await gateway.store.sessions(channel=Channel.LIVE)
    assert sorted((row.session.agent_id, row.call_count) for row in rows) == [("one", 1), ("two", 1)]


async def test_session_key_is_limited_to_its_session(gateway: RunningGateway) -> None:
    session, other = await gateway.open_session(), await gateway.open_session()
    assert (await chat(gateway, session.api_key)).status_code == 200
    assert len(await gateway.calls(session)) == 1
    responses = [
        await chat(gateway, session.api_key, f"/s/{other.session_id}/v1/chat/completions"),
        await gateway.http.get(f"/sessions/{other.session_id}", headers=auth_headers(session.api_key)),
        await gateway.post_json(f"/sessions/{other.session_id}/complete", {}, session.api_key),
        await gateway.post_json("/sessions", {}, session.api_key),
    ]
    assert [response.status_code for response in responses] == [403] * 4
    assert await gateway.calls(other) == []


async def test_second_admin_key_has_full_access(gateway: RunningGateway) -> None:
    key = await create_key(gateway.store, "admin", None)
    session = await gateway.open_session()
    assert (await gateway.post_json("/sessions", {}, key)).status_code == 201
    body = {"rewards": [{"value": 1.0, "source": "rule"}]}
    completed = await gateway.post_json(f"/sessions/{session.session_id}/complete", body, key)
    assert completed.status_code == 200, completed.text


async def test_revoked_key_is_rejected_within_five_seconds(gateway: RunningGateway) -> None:
    key = await create_key(gateway.store, "agent", "coder", "laptop")
    assert (await chat(gateway, key)).status_code == 200
    assert await gateway.store.revoke_key("laptop") == 1
    deadline = time.monotonic() + 5
    while (response := await chat(gateway, key)).status_code == 200:
        assert time.monotonic() < deadline, "the revoked key still works"
        await asyncio.sleep(0.2)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
async def test_key_is_accepted_in_three_headers(gateway: RunningGateway, header: str) -> None:
    value = f"Bearer {ADMIN_KEY}" if header == "Authorization" else ADMIN_KEY
    response = await gateway.http.post("/v1/chat/completions", json=CHAT_BODY, headers={header: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer"}, {"Authorization": "Basic eDp5"}, {"x-api-key": "wrong"}]
)
async def test_request_without_a_known_key_is_rejected(
    gateway: RunningGateway, headers: dict[str, str]
) -> None:
    for response in (
        await gateway.http.post("/v1/chat/completions", json=CHAT_BODY, headers=headers),
        await gateway.http.post("/sessions", json={}, headers=headers),
        await gateway.http.get("/v1/models", headers=headers),
    ):
        assert response.status_code == 401, response.text
    assert await gateway.store.sessions() == []


async def test_known_keys_are_cached(tmp_path: Path) -> None:
    """The keys are still accepted after the store has been closed."""
    store = SqliteStore(tmp_path / "store.db")
    await store.open_session(Session("s", "run", "coder", "policy", Channel.LIVE), hash_key("session-key"))
    await store.open_session(
        Session("t", "other-run", "coder", "policy", Channel.LIVE), hash_key("other-run-key")
    )
    agent_key = await create_key(store, "agent", "coder")
    authenticator = Authenticator(store, ADMIN_KEY, "run", max_cached_keys=8)
    for key in (agent_key, "session-key"):
        await authenticator.identify(key)
    with pytest.raises(ApiError, match="not valid for this run"):
        await authenticator.identify("other-run-key")
    await store.close()
    assert (await authenticator.identify(agent_key)).kind == "agent"
    assert (await authenticator.identify("session-key")).session_id == "s"


async def test_number_of_cached_keys_is_limited(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    first, second = [await create_key(store, "agent", "coder", name) for name in ("one", "two")]
    authenticator = Authenticator(store, ADMIN_KEY, "run", max_cached_keys=1)
    for key in (first, second):
        await authenticator.identify(key)
    await store.close()
    assert (await authenticator.identify(second)).kind == "agent"
    with pytest.raises(StoreError):
        await authenticator.identify(first)


async def test_agent_can_have_several_keys(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    first, second = [await create_key(store, "agent", "coder", name) for name in ("one", "two")]
    authenticator = Authenticator(store, ADMIN_KEY, "run", max_cached_keys=8)
    for key in (first, second):
        caller = await authenticator.identify(key)
        assert (caller.kind, caller.agent_id, caller.session_id) == ("agent", "coder", None)
    await store.close()


# --- the admin key in the environment -------------------------------------------------------------

VARIABLE = "INSTAR_ADMIN_KEY"


@pytest.mark.parametrize(
    ("host", "key", "message"),
    [
        ("127.0.0.1", "", "0 characters"),
        ("127.0.0.1", "secret", "6 characters"),
        ("::1", "x" * 15, "15 characters"),
        ("0.0.0.0", "x" * 31, "31 characters"),
        ("::", "x" * 31, "gateway.host"),
        ("gateway.example.org", "x" * 31, "gateway.example.org"),
        ("localhost", "with a space in it", "not printable ASCII"),
        ("localhost", "x" * 40 + "\n", "not printable ASCII"),
    ],
)
def test_weak_or_unprintable_admin_key_is_rejected(host: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_admin_key({VARIABLE: key}, VARIABLE, host)
    assert VARIABLE in str(caught.value)
    # A short test key may also occur as a word in the message.
    assert len(key) < 15 or key.strip() not in str(caught.value)


def test_admin_key_is_read_from_the_environment_or_generated() -> None:
    assert resolve_admin_key({VARIABLE: "x" * 16}, VARIABLE, "localhost") == "x" * 16
    assert resolve_admin_key({VARIABLE: "x" * 32}, VARIABLE, "0.0.0.0") == "x" * 32
    first, second = resolve_admin_key({}, VARIABLE, "0.0.0.0"), resolve_admin_key({}, VARIABLE, "0.0.0.0")
    assert first != second
    assert len(first) > 40
