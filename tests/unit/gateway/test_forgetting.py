"""A running gateway neither answers from nor stores again the data of sessions that were deleted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from instar.config import GatewayConfig, RedactConfig, RetentionConfig
from instar.gateway.forgetting import RetentionPolicy, delete_expired_once
from instar.gateway.pipeline.parse import encode_user_id
from instar.gateway.request_cache import MIN_CACHED_BODY
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.store.sqlite import SqliteStore
from instar.types import Channel, Session, SessionStatus
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import build_request, get_session_id, post, wait_for_in_flight

TEXT = "my private text"
PADDING = {"padding": "x" * MIN_CACHED_BODY}
"""Metadata that makes a body large enough for the request cache."""
HOUR = 3600.0


async def forget(gateway: RunningGateway, *session_ids: str) -> None:
    """Delete the sessions, as another process does."""
    other = SqliteStore(gateway.store_path)
    assert await other.forget_sessions("run", session_ids) == list(session_ids)
    assert await other.erase_deleted(rewrite=True)
    await other.close()


def is_text_stored(gateway: RunningGateway) -> bool:
    files = gateway.store_path.parent.glob(f"{gateway.store_path.name}*")
    return any(TEXT.encode() in file.read_bytes() for file in files)


async def get_session_status(gateway: RunningGateway, session_id: str) -> int:
    response = await gateway.http.get(
        f"/sessions/{session_id}", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
    )
    return response.status_code


async def wait_until_dropped(gateway: RunningGateway) -> None:
    """Wait until the gateway has no session in memory."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with asyncio.timeout(30):
        while (await gateway.http.get("/stats", headers=headers)).json()["sessions_in_memory"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_forgotten_session_is_dropped_from_memory_and_cannot_be_continued(
    gateway: RunningGateway,
) -> None:
    opened = await gateway.open_session(metadata={"note": TEXT})
    first = await post(
        gateway, build_request("chat", TEXT, metadata=PADDING), prefix=f"/s/{opened.session_id}"
    )
    reply = first.json()["choices"][0]["message"]["content"]
    assert is_text_stored(gateway)
    await forget(gateway, opened.session_id)
    assert not is_text_stored(gateway)
    assert await get_session_status(gateway, opened.session_id) == 404
    await wait_until_dropped(gateway)
    body = build_request("chat", TEXT, reply, "go on", metadata=PADDING)
    response = await post(gateway, body, prefix=f"/s/{opened.session_id}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
    response = await gateway.post_json("/feedback", {"session_id": opened.session_id, "text": TEXT})
    assert response.status_code == 404
    assert not is_text_stored(gateway)


async def test_key_of_a_forgotten_session_is_rejected(gateway: RunningGateway) -> None:
    opened = await gateway.open_session()
    headers = {"Authorization": f"Bearer {opened.api_key}"}
    assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200
    await forget(gateway, opened.session_id)
    await wait_until_dropped(gateway)
    assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 401


async def test_continued_conversation_of_a_forgotten_session_opens_a_new_one(gateway: RunningGateway) -> None:
    """The gateway finds the session by content, and forgets that, too."""
    response = await post(gateway, build_request("chat", "hello"))
    session_id, reply = get_session_id(response), response.json()["choices"][0]["message"]["content"]
    await forget(gateway, session_id)
    await wait_until_dropped(gateway)
    continued = get_session_id(await post(gateway, build_request("chat", "hello", reply, "go on")))
    assert continued != session_id
    assert await gateway.store.session(session_id) is None


async def test_call_in_flight_while_its_session_is_forgotten_is_not_stored(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(delay=0.02)
    opened = await gateway.open_session()
    call = asyncio.create_task(
        post(gateway, build_request("chat", f"{TEXT} {'word ' * 30}"), prefix=f"/s/{opened.session_id}")
    )
    await wait_for_in_flight(gateway, 1)
    await forget(gateway, opened.session_id)
    response = await call
    assert (response.status_code, response.json()["error"]["code"]) == (503, "store_error")
    assert "there is no session" in response.json()["error"]["message"]
    assert not is_text_stored(gateway)
    await wait_until_dropped(gateway)


async def test_retry_of_a_forgotten_call_is_not_replayed(gateway: RunningGateway) -> None:
    body = build_request("chat", TEXT)
    first = await post(gateway, body, idempotency_key="k")
    assert get_session_id(await post(gateway, body, idempotency_key="k")) == get_session_id(first)
    await forget(gateway, get_session_id(first))
    await wait_until_dropped(gateway)
    retried = await post(gateway, body, idempotency_key="k")
    assert get_session_id(retried) != get_session_id(first)
    assert retried.json()["id"] != first.json()["id"]


# --- users --------------------------------------------------------------------------------------

USER_FIELDS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("chat", {"user": "Ada"}, ["Ada"]),
    ("chat", {"safety_identifier": "Ada", "metadata": {"user_id": "Grace"}}, ["Ada", "Grace"]),
    ("completions", {"user": "Ada"}, ["Ada"]),
    ("responses", {"user": "Ada"}, ["Ada"]),
    ("messages", {"metadata": {"user_id": "Ada"}}, ["Ada"]),
    ("messages", {"metadata": {"user_id": "user_1_account_2_session_3-4"}}, ["user_1_account_2"]),
    ("messages", {"metadata": {"user_id": '{"account_uuid": "Ada", "session_id": "3"}'}}, ["Ada"]),
    ("messages", {"metadata": {"user_id": '{"name": "Ada"}'}}, ['{"name": "Ada"}']),
    ("chat", {"user": "u" * 1000}, []),
]


@pytest.mark.parametrize(("dialect", "fields", "users"), USER_FIELDS)
async def test_users_of_requests_are_recorded_with_their_session(
    gateway: RunningGateway, dialect: str, fields: dict[str, Any], users: list[str]
) -> None:
    session_id = get_session_id(await post(gateway, build_request(dialect, "hi", **fields), dialect))
    for user in users:
        assert await gateway.store.session_ids("run", user_id=user) == [session_id]
    rows = await gateway.store.read(lambda db: db.execute("SELECT user_id FROM session_users").fetchall())
    assert len(rows) == max(1, len(users))
    assert all(len(row["user_id"]) <= 512 for row in rows)


async def test_session_of_several_users_is_found_by_each_of_them(gateway: RunningGateway) -> None:
    opened = await gateway.open_session()
    for user in ("Ada", "Ada", "Grace", "Ada"):
        await post(gateway, build_request("chat", "hi", user=user), prefix=f"/s/{opened.session_id}")
    for user in ("Ada", "Grace"):
        assert await gateway.store.session_ids("run", user_id=user) == [opened.session_id]


async def test_redacted_user_is_stored_as_a_hash_that_finds_the_session(start_gateway: StartGateway) -> None:
    patterns = RedactConfig(patterns=[r"\S+@\S+"])
    gateway = await start_gateway(config=GatewayConfig(redact=patterns))
    session_id = get_session_id(await post(gateway, build_request("chat", "hi", user="ada@example.com")))
    user_id = encode_user_id("ada@example.com", Redactor.from_config(patterns), MessageHasher(b""))
    assert await gateway.store.session_ids("run", user_id=user_id) == [session_id]
    files = gateway.store_path.parent.glob(f"{gateway.store_path.name}*")
    assert not any(b"ada@example.com" in file.read_bytes() for file in files)


# --- retention ----------------------------------------------------------------------------------


async def test_delete_expired_once_deletes_a_limited_number_of_the_oldest(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    for number in range(40):
        at = time.time() - (100 - number) * HOUR
        fields: dict[str, Any] = {"status": SessionStatus.COMPLETED, "created_at": at, "ended_at": at}
        await store.open_session(Session(f"s{number}", "run", "a", "p", Channel.LIVE, **fields))
    policy = RetentionPolicy(RetentionConfig(days=3), keep_checkpoints=2)
    assert await delete_expired_once(store, "run", policy, limit=20) == 20
    assert await delete_expired_once(store, "run", policy, limit=20) == 9
    assert await delete_expired_once(store, "run", policy) == 0
    remaining = [row.session.session_id for row in await store.sessions("run")]
    assert remaining == [f"s{number}" for number in range(29, 40)]
    (forgotten,) = await store.forgotten_sessions(["s0"])
    assert forgotten.cause == "retention"
    await store.close()


async def test_gateway_deletes_expired_sessions_in_the_background(
    tmp_path: Path, start_gateway: StartGateway
) -> None:
    store = SqliteStore(tmp_path / "store.db")
    at = time.time() - 2 * HOUR
    for session_id in ("old", "new"):
        fields: dict[str, Any] = {"status": SessionStatus.COMPLETED, "created_at": at, "ended_at": at}
        await store.open_session(Session(session_id, "run", "agent", "policy", Channel.LIVE, **fields))
        at = time.time()
    policy = RetentionPolicy(RetentionConfig(days=1 / 24), keep_checkpoints=2)
    gateway = await start_gateway(retention=policy)
    async with asyncio.timeout(30):
        while await gateway.store.session("old") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await gateway.store.session("new") is not None
    await store.close()
